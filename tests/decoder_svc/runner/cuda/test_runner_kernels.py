"""The CUDA runner with its Triton kernels in Triton's interpreter, in steps with and without graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decoder_svc.runner.cuda.runner import GPUModelRunner
from tests import tiny_models
from tests.decoder_svc.runner.cuda.fake_cuda import installed
from tests.decoder_svc.runner.cuda.interpreted_triton import TritonBackend, triton_attention
from tests.parity import offline


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> offline.OfflineModel:
    folder = tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")
    return offline.build(folder, num_prompts=2, images_per_prompt=(0, 1))


@pytest.mark.parametrize("use_graphs", [True, False])
def test_answers_are_the_references(reference: offline.OfflineModel, use_graphs: bool) -> None:
    num_threads = torch.get_num_threads()
    config = replace(reference.runner.config, max_num_seqs=2, use_graphs=use_graphs)
    with installed(triton_attention) as cuda:
        model = replace(reference, runner=GPUModelRunner(config, reference.runner.family))
        assert isinstance(model.runner.backend, TritonBackend)
        session = offline.Session(model, num_blocks=60)
        model.runner.capture_model()
        assert (model.runner.graphs is not None) == use_graphs
        before = cuda.device.num_launches
        answers = session.ask([question.prompt for question in model.questions])
        assert cuda.device.num_launches > before
    torch.set_num_threads(num_threads)
    assert answers.token_ids == [question.expected for question in model.questions]
