"""The demo: it learns, it reports its freeze in every line, and it notices when the freeze did not hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frozen_opt
from frozen_opt.commands.bad_input import BadInput
from frozen_opt.demo import config as demo_config
from frozen_opt.demo import learners as demo_learners
from frozen_opt.demo import ppo as demo_ppo
from frozen_opt.demo import run as demo_run
from tests.versions import needs_fused_experts, needs_muon

SMALL = ["trainer.steps=3", "trainer.train_batch_size=16"]
POLICY = "trainer.policy.freeze_parameters="
CRITIC = "trainer.critic.freeze_parameters="


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


@pytest.fixture
def learners(monkeypatch: pytest.MonkeyPatch) -> dict[str, demo_learners.Learner]:
    """Filled with a run's learners when it has built them."""
    seen: dict[str, demo_learners.Learner] = {}
    make = demo_learners.make_learners

    def keep(config: Any) -> dict[str, demo_learners.Learner]:
        seen.update(make(config))
        return seen

    monkeypatch.setattr(demo_run, "make_learners", keep)
    return seen


def test_default_run_learns(tmp_path: Path) -> None:
    assert demo_run.run([], tmp_path)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 71))
    rewards = [row["reward"] for row in rows]
    quarter = len(rewards) // 4
    early, late = sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter
    assert late > early + 0.4
    assert late > 0.8
    for row in rows:
        assert row["policy/frozen_parameter_count"] == 2
        assert row["critic/frozen_parameter_count"] == 1


@pytest.mark.parametrize(
    ("overrides", "frozen"),
    [
        pytest.param(
            [],
            {
                "policy": {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)},
                "critic": {"model.embed_tokens.weight"},
            },
            id="as shipped",
        ),
        pytest.param([POLICY + "[]", CRITIC + "null"], {"policy": set(), "critic": set()}, id="nothing"),
        pytest.param(
            [POLICY + '["*.embed_tokens.weight", "model.layers.0.*norm.weight"]', "trainer.critic=null"],
            {
                "policy": {
                    "model.embed_tokens.weight",
                    "model.layers.0.self_attn.q_norm.weight",
                    "model.layers.0.self_attn.k_norm.weight",
                    "model.layers.0.input_layernorm.weight",
                    "model.layers.0.post_attention_layernorm.weight",
                }
            },
            id="no critic",
        ),
        pytest.param(
            [
                CRITIC + '["*", "!value_head.*", "!*.mlp.experts.*"]',
                "trainer.critic.optimizer_config.optimizer=SGD",
                "trainer.critic.optimizer_config.optimizer_kwargs={momentum: 0.9}",
                "trainer.policy.optimizer_config.optimizer=Muon",
            ],
            {"policy": {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)}, "critic": None},
            id="carve-outs, other optimizers",
            marks=needs_muon,
        ),
    ],
)
def test_frozen_stay_and_the_rest_moves(
    overrides: list[str],
    frozen: dict[str, set[str] | None],
    tmp_path: Path,
    learners: dict[str, demo_learners.Learner],
) -> None:
    config = demo_config.load_config(SMALL + overrides)
    before = {role: weights(learner.model) for role, learner in demo_learners.make_learners(config).items()}
    if "critic" in frozen and frozen["critic"] is None:
        kept = ("value_head.", "model.layers.0.mlp.experts.", "model.layers.1.mlp.experts.")
        frozen = {**frozen, "critic": {name for name in before["critic"] if not name.startswith(kept)}}
    learners.clear()

    assert demo_run.run(SMALL + overrides, tmp_path)

    assert set(learners) == set(frozen)
    for role, learner in learners.items():
        after = weights(learner.model)
        assert set(frozen_opt.report(role).names) == frozen[role]
        assert {name for name in after if torch.equal(after[name], before[role][name])} == frozen[role]
    rows = metrics(tmp_path)
    assert len(rows) == 3
    for row in rows:
        counts = {key: value for key, value in row.items() if key.endswith("/frozen_parameter_count")}
        assert counts == {
            f"{role}/frozen_parameter_count": len(names or ()) for role, names in frozen.items()
        }
        assert any(key.startswith("critic/") for key in row) == ("critic" in frozen)


@pytest.mark.parametrize(
    ("role", "name", "change"),
    [
        ("policy", "model.layers.1.mlp.gate.weight", lambda tensor: tensor[0, 0].add_(1e-6)),
        ("critic", "value_head.weight", lambda tensor: tensor.neg_()),  # all zero: only the sign bit moves
    ],
)
def test_a_frozen_tensor_that_moves_is_reported(
    role: str,
    name: str,
    change: Callable[[Tensor], Any],
    tmp_path: Path,
    learners: dict[str, demo_learners.Learner],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ppo_step = demo_ppo.ppo_step

    def meddle(*args: Any, **kwargs: Any) -> dict[str, float]:
        result = ppo_step(*args, **kwargs)
        if not moved_already:
            with torch.no_grad():
                change(learners[role].model.get_parameter(name))
            moved_already.append(name)
        return result

    moved_already: list[str] = []
    monkeypatch.setattr(demo_run, "ppo_step", meddle)
    assert not demo_run.run([*SMALL, POLICY + '["*.mlp.gate.weight"]', CRITIC + '["value_head.*"]'], tmp_path)
    assert "no: " in capsys.readouterr().out


@needs_fused_experts  # one that no token reaches has no state
def test_state_bytes_are_those_of_the_optimizers(
    tmp_path: Path, learners: dict[str, demo_learners.Learner], capsys: pytest.CaptureFixture[str]
) -> None:
    demo_run.run(SMALL, tmp_path)
    shown = capsys.readouterr().out
    for learner in learners.values():
        # AdamW holds two averages like the parameter, and a step count of four bytes
        sizes = {name: 8 * tensor.numel() + 4 for name, tensor in learner.model.named_parameters()}
        names = frozen_opt.report(learner.role).names
        assert f"{sum(sizes.values()):,} bytes" in shown
        assert f"{sum(size for name, size in sizes.items() if name not in names):,} bytes" in shown


def test_same_seed_same_run(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        demo_run.run([*SMALL, f"trainer.seed={seed}"], tmp_path / name)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b") != metrics(tmp_path / "c")


def test_a_refused_run_leaves_earlier_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("earlier")
    with pytest.raises(frozen_opt.UnmatchedPatternError):
        demo_run.run([POLICY + "[no.such.parameter]"], tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "earlier"


def test_threads_are_as_they_were(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        demo_run.run(SMALL, tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_gae_is_its_definition() -> None:
    torch.manual_seed(0)
    rewards, values = torch.rand(3, 5), torch.rand(3, 5)
    gamma, lambd = 0.9, 0.8
    following = torch.cat([values[:, 1:], torch.zeros(3, 1)], dim=1)
    surprises = rewards + gamma * following - values
    expected = torch.stack(
        [sum((gamma * lambd) ** k * surprises[:, t + k] for k in range(5 - t)) for t in range(5)], dim=1
    )
    torch.testing.assert_close(demo_ppo.gae(rewards, values, gamma, lambd), expected)


@pytest.mark.parametrize(
    ("task", "answer"), [("copy", [3, 1, 2]), ("reverse", [2, 1, 3]), ("sort", [1, 2, 3])]
)
def test_tasks(task: str, answer: list[int]) -> None:
    assert demo_ppo.TASKS[task](torch.tensor([[3, 1, 2]])).tolist() == [answer]


def test_rollout_reports_the_log_probabilities_that_training_computes() -> None:
    config = demo_config.load_config([*SMALL, "trainer.critic=null"])
    policy = demo_learners.make_learners(config)["policy"].model
    batch = demo_ppo.collect(policy, None, config)
    loss = demo_ppo.policy_loss(policy, batch, config.trainer.algorithm)
    again = policy(batch.tokens[:, :-1]).logits[:, -4:].log_softmax(-1)
    entropy = -(again.exp() * again).sum(-1).mean()
    chosen = again.gather(-1, batch.answers[..., None]).squeeze(-1)
    torch.testing.assert_close(chosen, batch.log_probs)
    # on the policy that sampled, the ratio is 1 and the normalised advantages cancel
    assert loss.item() == pytest.approx(-0.02 * entropy.item(), abs=1e-5)


def test_a_schedule_changes_the_lists_in_mid_run(
    tmp_path: Path, learners: dict[str, demo_learners.Learner], logs: list[Any]
) -> None:
    schedules = [
        """trainer.policy.freeze_schedule={3: [], 4: ["*.embed_tokens.weight"]}""",
        """trainer.critic.freeze_schedule={2: ["*.mlp.gate.weight"]}""",
    ]
    assert demo_run.run([*SMALL, "trainer.steps=5", *schedules], tmp_path)
    counts = [
        (row["policy/frozen_parameter_count"], row["critic/frozen_parameter_count"])
        for row in metrics(tmp_path)
    ]
    assert counts == [(2, 1), (2, 2), (0, 2), (1, 2), (1, 2)]
    policy = learners["policy"]
    state = policy.optimizer.state
    named = policy.model.named_parameters()
    steps = {name: int(state[parameter]["step"]) for name, parameter in named if parameter in state}
    # Two epochs a step: what thawed in step 3 has taken six of them, all else ten.
    assert {name for name, count in steps.items() if count == 6} == {
        f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)
    }
    assert set(steps.values()) == {6, 10}
    assert "model.embed_tokens.weight" not in steps


def test_a_frozen_weight_that_moves_before_its_list_changes_is_not_forgotten(
    tmp_path: Path, learners: dict[str, demo_learners.Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    change = demo_learners.change_list

    def nudge(learner: demo_learners.Learner, *rest: Any) -> None:
        with torch.no_grad():
            learner.model.model.layers[0].mlp.gate.weight.add_(1)
        change(learner, *rest)

    monkeypatch.setattr(demo_run, "change_list", nudge)
    assert not demo_run.run([*SMALL, "trainer.policy.freeze_schedule={2: []}"], tmp_path)


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ("{1: []}", "steps from 2 on"),
        ("{x: []}", "steps from 2 on"),
        ("[3]", "malformed override"),
        ("{2: []} trainer.strategy=ddp", "is for torch and fsdp2"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(tmp_path: Path, schedule: str, says: str) -> None:
    first, *more = schedule.split(" trainer")
    overrides = [f"trainer.policy.freeze_schedule={first}", *(f"trainer{each}" for each in more)]
    with pytest.raises(BadInput, match=says):
        demo_run.run(overrides, tmp_path)
