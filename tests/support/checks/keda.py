"""Metrics of KEDA's `nats-jetstream` scaler, and the replicas that KEDA and the HPA of Kubernetes derive from them.

Sources: KEDA 2, pkg/scalers/nats_jetstream_scaler.go (account, stream and consumer, the leader of a cluster, the lag)
and pkg/scaling/executor (0 to 1 and back); Kubernetes, the algorithm of the HPA for an external metric with an
AverageValue (a tolerance of 10 %, no more than twice or four more at once, the highest of the stabilization window).
"""

import json
import math
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_TOLERANCE = 0.1


def lag_of(monitors: Sequence[str], account: str, stream: str, consumer: str) -> int:
    """Messages that wait for the consumer or are leased, by the monitor (host:port) of the consumer's leader.

    As KEDA: 0 where the account has no such stream, and the stream's last sequence where it has no such consumer.
    """
    own = [_stream(_ask(monitor, f"/jsz?acc={account}&consumers=true&config=true"), account, stream)
           for monitor in monitors]  # fmt: skip
    names = [_ask(monitor, "/varz")["server_name"] for monitor in monitors] if len(monitors) > 1 else []
    for index, found in enumerate(own):
        for one in found.get("consumer_detail", ()):
            leads = len(monitors) == 1 or one.get("cluster", {}).get("leader") == names[index]
            if one["name"] == consumer and leads:
                return int(one["num_pending"] + one["num_ack_pending"])
    return max(int(found.get("state", {}).get("last_seq", 0)) for found in own)


def _stream(answer: Mapping[str, Any], account: str, stream: str) -> Mapping[str, Any]:
    for one in answer.get("account_details", ()):
        if one["name"] == account:
            for detail in one.get("stream_detail", ()):
                if detail["name"] == stream:
                    return detail
    return {}


def _ask(monitor: str, path: str) -> Any:
    with urllib.request.urlopen(f"http://{monitor}{path}", timeout=5) as answer:
        return json.load(answer)


@dataclass
class Autoscaler:
    """Decides at each poll. Times are in seconds, of any clock."""

    min_replicas: int
    max_replicas: int
    lag_threshold: int
    activation_lag_threshold: int
    cooldown_seconds: float
    scale_down_seconds: float
    _active_at: float = -math.inf
    _wanted: list[tuple[float, int]] = field(default_factory=list)

    @classmethod
    def of(cls, scaled_object: Mapping[str, Any]) -> "Autoscaler":
        """Settings of a manifest whose triggers have the same thresholds."""
        spec, metadata = scaled_object["spec"], scaled_object["spec"]["triggers"][0]["metadata"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        return cls(
            spec["minReplicaCount"],
            spec["maxReplicaCount"],
            int(metadata["lagThreshold"]),
            int(metadata["activationLagThreshold"]),
            spec["cooldownPeriod"],
            behavior["scaleDown"]["stabilizationWindowSeconds"],
        )

    def replicas(self, lags: Sequence[int], now: int, at: float) -> int:
        """Desired number of replicas at a time, from `now` replicas and the lag of each trigger."""
        active = any(lag > self.activation_lag_threshold for lag in lags)
        if active:
            self._active_at = at
        if now == 0:
            return max(1, self.min_replicas) if active else self.min_replicas
        if not active and self.min_replicas == 0 and at - self._active_at >= self.cooldown_seconds:
            self._wanted.clear()
            return 0
        wanted = max(self._of_lag(lag, now) for lag in lags)
        wanted = min(wanted, self.max_replicas, max(2 * now, now + 4))
        wanted = max(wanted, self.min_replicas, 1)
        self._wanted = [(t, n) for t, n in self._wanted if at - t <= self.scale_down_seconds] + [(at, wanted)]
        return max(n for _, n in self._wanted) if wanted < now else wanted

    def _of_lag(self, lag: int, now: int) -> int:
        if abs(lag / (self.lag_threshold * now) - 1) <= _TOLERANCE:
            return now
        return math.ceil(lag / self.lag_threshold)
