"""A Kubernetes API small enough to live on one Mac.

Custom resources, Services, EndpointSlices, Leases and Events with the semantics unmodified clients
expect (kubectl, the Python client), in one process without dependencies, on loopback only, with all data
in one SQLite file. `make run` uses it instead of a cluster, and our tests run against it.
`tests/contract` compares it with a real server (1.36); these are the known differences:

==============================  ==================================  ============================================
what                            the real server                     this one
==============================  ==================================  ============================================
rules in CEL                    all                                 those in `cel.py`; others are not applied
wrong types of built-in kinds   400 for what Go cannot decode, and  422, naming each field, as for custom kinds
                                of a patch a 422 about the patch
times of Leases and Events      exactly six digits, kept in UTC     any RFC 3339 time, kept as it is sent
messages of errors              Go's words, type and struct names   the same status and reason, words of its own
a fraction for an integer,      422                                 500
applied
paths that mean nothing         404 as plain text                   404 as a Status
YAML as body or answer          YAML                                415 or 400; JSON
explain of built-in kinds       describes the fields                names them and their types
OpenAPI v2                      with definitions, by which kubectl  empty; the server names a wrong item of a List,
                                refuses a List with a wrong item    and the ones before it have been applied
empty fields of built-in kinds  as Go has them: null, {}, or left   as they were sent
                                out
items of lists of those         without apiVersion and kind         with them
PUT of a missing object         creates some built-in kinds         404
PUT without a version           refused for some kinds              replaces whatever version there is
POST of a name that is taken    checks the object first             409 at once
bodies without a kind           400 for custom kinds                taken for the kind of the path
metadata                        annotations are bounded, and a      within the size of a request; like any other
                                deletion takes no new finalizers    write
warnings                        also for FQDN slices, finalizers    for unknown fields
                                without a domain, externalIPs
deletion in the foreground      the owner waits for its dependents  as in the background
wrong parameters of requests    422                                 400; `force` and the length of `fieldManager`
                                                                    are not checked
deletion that orphans           dependents stay                     400; `orphanDependents`, its old form, 400
several owners, one is gone     its reference is dropped            stays until the last one is gone
lists and gets by `limit`,      chunks, states of the past, and     everything as it is now
`continue`, `resourceVersion`   504 for what is yet to come
`as=PartialObjectMetadata`      metadata alone                      whole objects
watch from a future version     stays open without events           410 Expired
`format` in a CRD               all of OpenAPI                      date-time
other words of a CRD's schema   all                                 none of `nullable`, `not`, `oneOf`, `allOf`,
                                                                    `anyOf`, `multipleOf`, `exclusiveMinimum`,
                                                                    `exclusiveMaximum`, embedded resources
`pattern` of a CRD              linear time, whatever the pattern   backtracks: `^(a+)+$` holds up all requests
a CRD that becomes stricter     not for fields that stay            not where the metadata alone is edited
a CRD with a new default        applied to what is read             applied by the next write
objects whose owner goes with   are collected                       stay, until the CRD is back
its CRD
EndpointSlices, Events and      more than types is checked          only the types, and immutable `clusterIP`
Services
ConfigMaps and Secrets          names and size of data are checked  any, within the size of a request; `immutable`
                                                                    and the type of a Secret bind nothing
status of a CRD                 names, versions and conditions      only the condition Established
preferred version of a group    the most stable one                 the one that is stored
strategic patches               all directives; new items come      those of kubectl, which orders all items; without
                                first in a list                     that order new ones come last, `replace` is refused
JSON patches                    `-1` is the last item; what is not  422, as RFC 6902 says
                                there is null to `copy` and `test`
DELETE of a collection          deletes its objects                 405
a deleted Service               is the answer                       a Status is the answer, as for other kinds
DELETE with options in a body   ignores those in the query          both count, the body's first
POST to `…/<plural>/<name>`     creates, for custom kinds           405
what holds a deleted namespace  `spec.finalizers`                   `metadata.finalizers`
from `kubectl apply` to         fields that are as applied before   a conflict, until `--force-conflicts`; the
`--server-side`                 may change; its annotation follows  annotation stays as it is
apply while a CRD is deleted    creates what goes with the rest     405, as a POST
field selectors                 more fields of built-in kinds, and  name and namespace; of Events also what they
                                `selectableFields` of a CRD         are about, reason, reporter and type
`kubectl get -o wide`           more columns of built-in kinds      those of `kubectl get`
`jsonPath` of columns           all                                 fields, `[*]` and `[?(@.field=="text")]`
order of items in an apply      both orders are kept where they go  live items keep theirs, new ones come last
                                together
`kubectl get crd`               when it was created                 its age
`kubectl get svc`               `<pending>`, or an external name    only external addresses
`kubectl auth can-i`            answers                             415: reviews are understood only as JSON
Lease `strategy`                dropped (a feature gate)            kept
Service ClusterIPs              chosen at random; any other is      the first that is free; any other is taken
                                checked, and has IP families        as it is sent
Services of other types         node ports are chosen, fields that  are stored as sent
                                do not go together refused
status of a Service             only load balancers have ingress    not checked
Pods and all other kinds        yes                                 404: they don't exist here
==============================  ==================================  ============================================
"""

from .kernel import Options
from .server import ApiServer, serve
from .storage import UnusableData

__all__ = ["ApiServer", "Options", "UnusableData", "serve"]
