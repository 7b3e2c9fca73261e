"""What follows from a cluster's answer: a right that is missing, or a manifest that is not admitted."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from kubeflow_training.jobs.errors import JobForbiddenError, JobRefusedError
from kubeflow_training.jobs.kubernetes.answers import sorted_errors
from kubeflow_training.jobs.kubernetes.client import refusal

RIGHT = 'pods is forbidden: User "u" cannot list resource "pods" in API group "" in the namespace "n"'
WEBHOOK = 'admission webhook "w" denied the request: no'
QUOTA = 'pytorchjobs.kubeflow.org "j" is forbidden: exceeded quota: small'
POLICY = "pytorchjobs.kubeflow.org \"j\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request"


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (403, RIGHT, JobForbiddenError),
        (403, WEBHOOK, JobRefusedError),
        (403, QUOTA, JobRefusedError),
        (403, POLICY, JobRefusedError),
        (422, RIGHT, JobRefusedError),
    ],
)
def test_both_clients_tell_a_missing_right_from_what_is_not_admitted(status, message, kind):
    from kubernetes.client.exceptions import ApiException

    body = json.dumps({"message": message})
    answer = SimpleNamespace(status=status, reason="no", data=body, getheaders=dict)
    with pytest.raises(JobRefusedError) as caught, sorted_errors("job"):
        raise ApiException(http_resp=answer)
    found = [caught.value, refusal("job", status, body)]
    assert [type(error) for error in found] == [kind, kind]
    assert all(("rights" in error.mend) is (kind is JobForbiddenError) for error in found)
