"""Scripts that measure; README.md has the list. What they compute themselves has the threads of the services."""

from lookonce.model.openmp import limit_patience

limit_patience()
