"""What a script with the two lines of Ebbflow imports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

HEAVY = [
    "matplotlib", "jinja2", "sklearn", "typer", "rich", "distributed", "torchft", "skorch", "pytorch_optimizer",
    "transformers", "accelerate", "lightning", "ray", "wandb", "mlflow", "tensorboard",
]  # fmt: skip


def imported_by(program: str) -> set[str]:
    """The top-level packages that a program imports, in a process of its own."""
    tail = "; import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    output = subprocess.check_output([sys.executable, "-c", program + tail], text=True, timeout=120)
    return set(json.loads(output))


def test_the_two_line_user_imports_no_plotting_no_templates_and_no_scikit_learn() -> None:
    packages = imported_by("from ebbflow import ElasticSampler, ElasticOptimizer, BatchPlan, Trace")
    assert {"torch", "numpy", "ebbflow"} <= packages
    assert packages.isdisjoint(HEAVY)


def test_using_the_two_lines_imports_none_of_them_either() -> None:
    program = (
        "import torch; from ebbflow import BatchPlan, ElasticOptimizer, ElasticSampler, Trace; "
        "w = torch.nn.Parameter(torch.ones(3)); "
        "plan = BatchPlan.from_trace(Trace.parse('0s:2 60s'), 'follow(4)', '1s'); "
        "sampler = ElasticSampler(16, plan, local_batch=4); "
        "optimizer = ElasticOptimizer(torch.optim.SGD([w], lr=0.1), 'adascale', base_batch=4, sampler=sampler); "
        "[(w.sum() * len(batch)).backward() or optimizer.step() or optimizer.zero_grad() for batch in sampler]"
    )
    assert imported_by(program).isdisjoint(HEAVY)


def test_importing_the_package_alone_does_not_import_torch() -> None:
    assert imported_by("import ebbflow").isdisjoint(["torch", "numpy", *HEAVY])


def test_traces_plans_and_rules_work_without_torch() -> None:
    program = "from ebbflow import BatchPlan, make_rule; make_rule('adascale+warmup(1ep)'); import ebbflow.nqm"
    assert "torch" not in imported_by(program)
