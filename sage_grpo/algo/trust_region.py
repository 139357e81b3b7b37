"""Dual trust region: position (KL to an anchor), velocity (KL to the rollout's policy), and their coefficient.

    L_KL = beta_pos KL(pi || pi_anchor) + beta_vel KL(pi || pi_prev)          (Eq. 40)

It is added to the minimized loss with a plus (Eq. 43 as printed has a minus), scaled by the coefficient lambda that
`KLController` adjusts (Eq. 41-42). Position and velocity are the paper's words for the policy's distance from the
anchor and its change since the rollout; the latter is not the model's output v. Shapes: B samples.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

ESTIMATORS = ("exact", "logprob")
SCHEDULES = ("fixed", "two_stage", "adaptive")
# factors on lambda when the KL is too high, too low
FEEDBACKS = {
    "paper": (0.9, 1.1),
    "trust_region": (1.1, 0.9),
}


@dataclass(frozen=True)
class TrustRegion:
    """A strategy: which anchor to keep, and the two weights."""

    anchor: str | None  # None, "fixed" (the pretrained policy) or "moving"
    position_weight: float
    velocity_weight: float

    def kl(self, to_anchor: Tensor | float, to_rollout: Tensor | float) -> Tensor | float:
        """L_KL of Eq. 40. Pass 0 for a term that the strategy does not use."""
        return self.position_weight * to_anchor + self.velocity_weight * to_rollout


def trust_region(
    kl_weight: float,
    use_moving_KL: bool,
    use_dual_kl: bool,
    dual_kl_moving_weight: float,
    dual_kl_step_weight: float,
) -> TrustRegion:
    """The strategy selected by the flags: no, fixed, step-wise, moving, dual moving or dual fixed KL."""
    position = dual_kl_moving_weight
    velocity = dual_kl_step_weight if use_dual_kl else 0.0
    weights = {
        "kl_weight": kl_weight,
        "dual_kl_moving_weight": position,
        "dual_kl_step_weight": velocity,
    }
    for name, value in weights.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}; a weight of the KL must be at least 0")
    if kl_weight == 0:
        return TrustRegion(None, 0.0, 0.0)
    if position == velocity == 0:
        raise ValueError(
            f"kl_weight is {kl_weight} but both KL terms weigh 0: give one a weight, or kl_weight 0"
        )
    if position == 0:
        return TrustRegion(None, position, velocity)
    return TrustRegion("moving" if use_moving_KL else "fixed", position, velocity)


def rollout_kl(estimator: str, exact: Tensor, log_prob: Tensor, log_prob_rollout: Tensor) -> Tensor:
    """KL (B,) from the current policy to the rollout policy, computed as `step_kl_estimator` says.

    `exact` is the closed form, `Schedule.kl`. `logprob` is the published estimator (Eq. 15); on-policy its value is 0
    and its gradient equals that of -log_prob, which has mean zero: pure noise.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"step_kl_estimator is {estimator!r}; choose one of {', '.join(ESTIMATORS)}"
        )
    return exact if estimator == "exact" else log_prob_rollout - log_prob


@dataclass(eq=False)
class KLController:
    """lambda_KL, one state for all ranks. Read `kl_lambda`, then call `update` once per optimizer step.

    `fixed` holds kl_weight. `two_stage` rises linearly from kl_coef to kl_weight over the warm-up and stays (Eq. 41).
    `adaptive` does the same and then follows the mean of the last 10 KL values (Eq. 42): above 1.5 x target, lambda is
    multiplied by 0.9 under the published rule, which loosens the region as the policy leaves it, and by 1.1 under
    `trust_region`, as a Lagrange multiplier would; below 0.5 x target, the factors are swapped.
    """

    kl_weight: float = 1e-5  # the maximum of lambda
    kl_coef: float = 1e-7  # lambda at the start
    kl_min_coef: float = 1e-7
    kl_target: float = 1e-4
    kl_warmup_steps: int = 100
    kl_schedule: str = "adaptive"
    kl_feedback: str = "paper"

    def __post_init__(self) -> None:
        for name, choices in {"kl_schedule": SCHEDULES, "kl_feedback": FEEDBACKS}.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}"
                )
        # start and floor have no effect then
        if self.kl_schedule == "fixed" or self.kl_weight == 0:
            self.kl_coef = self.kl_min_coef = self.kl_weight
        for name, value in {"kl_coef": self.kl_coef, "kl_min_coef": self.kl_min_coef}.items():
            if not 0 <= value <= self.kl_weight:
                raise ValueError(
                    f"{name} is {value}; it must lie between 0 and kl_weight, the maximum ({self.kl_weight})"
                )
        if not self.kl_target > 0:
            raise ValueError(f"kl_target is {self.kl_target}; it must be positive")
        if self.kl_warmup_steps < 0:
            raise ValueError(f"kl_warmup_steps is {self.kl_warmup_steps}; it must be at least 0")
        self.step = 0
        self.kl_lambda = self._warmed_up(0)
        self.recent: deque[float] = deque(maxlen=10)

    def update(self, kl: float) -> float:
        """Record the KL of one optimizer step (mean over all ranks); returns the coefficient for the next."""
        if not 0 <= kl < float("inf"):
            raise ValueError(
                f"the KL is {kl}; the controller takes finite values of at least 0 only"
            )
        self.step += 1
        self.recent.append(kl)
        if self.step <= self.kl_warmup_steps:
            self.kl_lambda = self._warmed_up(self.step)
        elif self.kl_schedule == "adaptive":
            kl_lambda = self.kl_lambda * self._feedback()
            self.kl_lambda = min(max(kl_lambda, self.kl_min_coef), self.kl_weight)
        return self.kl_lambda

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "coef": self.kl_lambda, "recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.kl_lambda = state["coef"]
        self.recent = deque(state["recent"], maxlen=self.recent.maxlen)

    def _feedback(self) -> float:
        """The factor on lambda that the recent KL asks for."""
        too_high, too_low = FEEDBACKS[self.kl_feedback]
        mean = sum(self.recent) / len(self.recent)
        if mean > 1.5 * self.kl_target:
            return too_high
        if mean < 0.5 * self.kl_target:
            return too_low
        return 1.0

    def _warmed_up(self, step: int) -> float:
        progress = min(step / self.kl_warmup_steps, 1.0) if self.kl_warmup_steps else 1.0
        return self.kl_coef + (self.kl_weight - self.kl_coef) * progress
