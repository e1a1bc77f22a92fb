"""What the fork server imports: all that a rank needs, stand-ins before what imports them."""

import experiments.gpu_check.stand_ins  # noqa: F401

# isort: split
import dhp.cluster.worker
import dhp.engine.encoder_engine  # noqa: F401
import dhp.engine.text_engine  # noqa: F401
