"""What is compared, as overrides of config.yaml."""

METHODS = {
    "random": ["data.balance=random"],
    "isf": ["data.balance=isf"],
    "balanced": ["data.balance=balanced"],
    "sequence": ["data.balance=random", "vision.parallelism=sequence", "vision.ulysses=2"],
}
