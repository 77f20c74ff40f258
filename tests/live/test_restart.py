from __future__ import annotations

from ebbflow.live.supervisor import Ending, RestartPolicy


def endings(*codes: int, progressed: bool = False, policy: RestartPolicy | None = None) -> list[tuple[str, float]]:
    policy, failures, verdicts = policy or RestartPolicy(max_failures=5), 0, []
    for code in codes:
        ending = Ending(code=code, state="training", progressed=progressed)
        failures = policy.failures(failures, ending)
        verdicts.append(policy.judge(ending, failures))
    return verdicts


def test_pauses_double_and_the_fifth_death_without_a_step_is_the_last() -> None:
    assert endings(1, 1, -9, 1, 1) == [
        ("restart", 0.0), ("restart", 1.0), ("restart", 2.0), ("restart", 4.0), ("gave up", 0.0),
    ]  # fmt: skip


def test_pauses_have_an_end() -> None:
    policy = RestartPolicy(max_failures=100, first_pause_s=1, longest_pause_s=5)
    assert [pause for _, pause in endings(*[1] * 7, policy=policy)] == [0, 1, 2, 4, 5, 5, 5]


def test_a_replica_that_commits_steps_between_its_deaths_is_never_given_up() -> None:
    assert endings(*[-9] * 50, progressed=True) == [("restart", 0.0)] * 50


def test_asking_to_be_restarted_for_ever_is_given_up_too() -> None:
    assert endings(*[75] * 5)[-1] == ("gave up", 0.0)
    assert endings(75) == [("restart", 0.0)]


def test_code_0_is_the_end_and_the_status_says_which() -> None:
    policy = RestartPolicy()
    for state, verdict in [("finished", "finished"), ("left", "left"), ("leaving", "left"), (None, "finished")]:
        assert policy.judge(Ending(code=0, state=state, progressed=True), 0) == (verdict, 0.0)
