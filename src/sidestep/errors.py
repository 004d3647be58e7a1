"""Everything Sidestep raises on purpose.

    SidestepError
    ├── PlacementError             (ValueError)           a placement, or an argument of ``offload``, makes no sense
    ├── ConfigurationError         (ValueError)           another library's configuration cannot be read, and which key
    ├── HardwareError              (ValueError)           a description of a machine makes no sense, or is not known
    ├── NotYetError                (NotImplementedError)  a promised part that is not built yet, by name
    ├── UnsupportedOptimizerError  (TypeError)            this optimizer cannot be offloaded, and why
    ├── StateDictError             (ValueError)           a state dict does not fit; nothing was changed
    ├── CapacityError              (RuntimeError)         too little memory, and the least that works
    ├── BrokenStepError            (RuntimeError)         a step failed half way; load a checkpoint
    ├── VerificationError          (RuntimeError)         ``verify=`` has found a wrong bit; please report it
    ├── PinError                   (RuntimeError)         the driver refused to page-lock host memory
    └── SimulationError            (RuntimeError)         the simulated device refuses what a real one could not do

A device that runs out of memory raises ``torch.OutOfMemoryError``, as training loops expect.
"""


class SidestepError(Exception):
    """Base of every error that Sidestep raises on purpose."""


class PlacementError(SidestepError, ValueError):
    """A placement, or an argument of ``offload``, makes no sense."""


class ConfigurationError(SidestepError, ValueError):
    """Another library's configuration cannot be read; the message names the key."""


class HardwareError(SidestepError, ValueError):
    """A description of a machine makes no sense, or there is no preset of that name."""


class NotYetError(SidestepError, NotImplementedError):
    """A promised part of the public interface that is not built yet."""


class UnsupportedOptimizerError(SidestepError, TypeError):
    """The optimizer cannot be offloaded; the message says why."""


class StateDictError(SidestepError, ValueError):
    """A state dict does not fit the optimizer. Nothing was changed."""


class CapacityError(SidestepError, RuntimeError):
    """A memory limit is too small; the message says the least that works."""


class BrokenStepError(SidestepError, RuntimeError):
    """A step failed after it had changed some parameters; load a checkpoint of model and optimizer."""


class VerificationError(SidestepError, RuntimeError):
    """A step that ``verify=`` has computed a second time was not the same; the message names element and values."""


class PinError(SidestepError, RuntimeError):
    """The driver refused to page-lock host memory."""


class SimulationError(SidestepError, RuntimeError):
    """The simulated device was asked for something that a real device could not do."""
