"""A training loop of one's own: two groups of actors, refs between them, an optimizer step of both."""

import sys

import dhp


def main(overrides: list[str]) -> list[float]:
    """The loss of each step."""
    losses = []
    with dhp.Run(dhp.load_config("tiny", overrides), say=print) as run:
        vision, text = run.stages.values()  # a group of Ray actors each, with a parallelism of its own
        for step in run.steps:
            batch = run.read(step)  # refs: every rank's own share of the samples
            for micro_batch in run.micro_batches:
                features = vision.forward(batch, micro_batch)  # refs of tensors, from rank to rank
                text.forward(batch, micro_batch, features)
                gradients = text.backward(batch, micro_batch)
                vision.backward(batch, micro_batch, gradients)
            losses.append(run.wait(run.update(batch)).loss)  # clipped by the norm of both parts' gradients
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1:] or ["training.max_steps=3", "run_dir=runs/own-loop", "overwrite=true"])
