"""What a job is doing: a pure function over the job, its pods and events, `observe`, and the words of its answer."""

from kubeflow_training.jobs.observation.phases import Observation, Phase, told_best
from kubeflow_training.jobs.observation.reader import observe
from kubeflow_training.jobs.observation.reasons import Reason

__all__ = ["Observation", "Phase", "Reason", "observe", "told_best"]
