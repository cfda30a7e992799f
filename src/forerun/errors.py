"""What can go wrong for reasons the user can change.

    ForerunError
    ├── ConfigError        an option, sampling parameter or draft spec that cannot be used
    ├── ModelError         a model that cannot be found, read or run
    │   └── CheckpointError    its files are broken, or their tensors are not the expected ones
    ├── PromptError        a prompt that cannot be served (too long, empty)
    └── CapacityError      not enough memory for what was asked

Every message is one line and ends with what to do. What forerun itself got wrong is an `assert`.
"""


class ForerunError(Exception):
    """Base of all expected failures; the command line prints the message and exits with 1."""


class ConfigError(ForerunError):
    """An option, sampling parameter or draft spec that cannot be used as given."""


class ModelError(ForerunError):
    """A model that cannot be found, read or run."""


class CheckpointError(ModelError):
    """Broken weight files; tensors that are missing, unexpected or of the wrong shape."""


class PromptError(ForerunError):
    """A prompt that this model cannot be given."""


class CapacityError(ForerunError):
    """Not enough memory for the key/value store or for a request in it."""
