"""Scripts that measure; README.md has the list. What they compute themselves has the threads of the services."""

from lookonce.model.kernels.openmp import set_openmp_spin_count

set_openmp_spin_count()
