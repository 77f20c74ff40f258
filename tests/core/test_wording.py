"""Messages have the words of whoever reads them: arguments where Python code calls, options where the command runs."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from ebbflow.cli.main import app
from ebbflow.core.wording import called
from ebbflow.errors import EbbflowError
from ebbflow.plan import make_policy
from ebbflow.simulate.scenario import ScenarioSettings


def test_a_call_from_python_is_answered_in_words_of_python() -> None:
    scenario = ScenarioSettings(samples=10, epochs=1, noise_scale="8", spot_price="1")
    with pytest.raises(EbbflowError, match=r"^noise_scale= needs ref_batch=: "):
        scenario.scenario("constant(workers=2)")
    with pytest.raises(EbbflowError, match=r"in one way: step_time='0.6s', profile='FILE' .* or compute_step= and "):
        scenario.step_model()
    with pytest.raises(EbbflowError, match=r"lacks local_batch, .*give local_batch=32, or "):
        make_policy("follow", local_batch=None)


def test_the_command_is_answered_with_its_options_and_python_after_it_as_before() -> None:
    trace = "0s:2 1h"
    shared = ["simulate", trace, "--samples", "10", "--epochs", "1", "--local-batch", "2", "--spot-price", "1"]
    for more, message in (
        ([], "in one way: --step-time 0.6s, --profile FILE"),
        (["--step-time", "1s", "--noise-scale", "8"], "--noise-scale needs --ref-batch: "),
        (["--step-time", "1h"], "repeat it (--repeat), start it earlier"),
    ):
        result = CliRunner().invoke(app, [*shared, *more])
        assert isinstance(result.exception, EbbflowError)
        assert message in str(result.exception)
    assert called("out") == "out="
