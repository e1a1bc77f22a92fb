"""What the fork server imports: all that a rank needs, in the order in which stand-ins have to come."""

from __future__ import annotations

import experiments.gpu_check.older_torch
import experiments.gpu_check.ray_stand_in  # noqa: F401, I001  before dhp
import dhp.cluster.worker
import dhp.trainers.text
import dhp.trainers.vision  # noqa: F401
