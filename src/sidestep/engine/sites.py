"""Why each wait exists: its name, and the hazard it guards against.

A wait is made with one of these names. The tests delete each in turn and must then see damage.
"""

FETCH_WAITS_SLOT_MEMORY = "fetch waits for slot memory"
FETCH_WAITS_SLOT_DRAINED = "fetch waits for slot drained"
FETCH_WAITS_OWN_EVICTION = "fetch waits for own eviction"
FETCH_WAITS_OWN_SCATTER = "fetch waits for own scatter"
FETCH_WAITS_GATHER = "fetch waits for gather"
UPDATE_WAITS_FETCH = "update waits for fetch"
UPDATE_WAITS_NEWBORN_EVICTED = "update waits for newborn state evicted"
UPDATE_WAITS_IRREGULAR_DRAINED = "update waits for irregular buffer drained"
EVICT_WAITS_UPDATE = "evict waits for update"
SCATTER_WAITS_EVICTION = "scatter waits for eviction"
OUTBOUND_WAITS_BACKWARD = "outbound waits for backward"
OUTBOUND_WAITS_RETURNED = "outbound waits for returned parameters"
UPDATE_WAITS_BACKWARD = "update waits for backward"
FORWARD_WAITS_UPDATE = "forward waits for update"
HOST_UPDATE_WAITS_OUTBOUND = "host worker waits for outbound"
RETURN_WAITS_HOST_UPDATE = "return waits for host worker"
FORWARD_WAITS_RETURNED = "forward waits for returned parameters"
HOST_READS_OUTBOUND = "host reads outbound"
DEPARTURE_WAITS_GRADIENT = "departure waits for gradient"
DEPARTURE_WAITS_ARRIVAL = "departure waits for arrival"
DEPARTURE_WAITS_ADDITION = "departure waits for addition"
ADDITION_WAITS_DEPARTURE = "addition waits for departure"
ARRIVAL_WAITS_ADDITION = "arrival waits for addition"
HOST_READS_SUM = "host reads sum of gradients"
BACKWARD_WAITS_DEPARTURE = "backward waits for departed gradient"
ARRIVAL_WAITS_DEPARTURE = "arrival waits for departure"
ARRIVAL_WAITS_MEMORY = "arrival waits for gradient memory"
UPDATE_WAITS_ARRIVAL = "update waits for gradient"
HOST_READS_DEPARTED = "host reads departed gradient"
HOST_READS_EVICTED = "host reads evicted state"
HOST_READS_SCATTERED = "host reads scattered state"

HAZARDS: dict[str, str] = {
    FETCH_WAITS_SLOT_MEMORY: "a new slot's memory may still be in use by earlier work of the stream that allocated it",
    FETCH_WAITS_SLOT_DRAINED: "the slot's last state would be overwritten before it has been copied out",
    FETCH_WAITS_OWN_EVICTION: "a chunk would be fetched again, into another slot, before its last state has arrived",
    FETCH_WAITS_OWN_SCATTER: "pageable state would be fetched, past staging, before the host worker has put it there",
    FETCH_WAITS_GATHER: "staging would be sent to the device before the host worker has filled it",
    UPDATE_WAITS_FETCH: "the update would read state that has not arrived",
    UPDATE_WAITS_NEWBORN_EVICTED: "memory of state made in this step would be reused before it has been copied out",
    UPDATE_WAITS_IRREGULAR_DRAINED: "memory that a chunk had for its own time would be reused while it is copied out",
    EVICT_WAITS_UPDATE: "state would be copied out before the update has written it",
    SCATTER_WAITS_EVICTION: "the host worker would read staging before the device has filled it",
    OUTBOUND_WAITS_BACKWARD: "gradients and parameters would go to the host before backward has finished them",
    OUTBOUND_WAITS_RETURNED: "the next chunk would overwrite new parameters in staging before they have been sent",
    UPDATE_WAITS_BACKWARD: "an overlapped update would read gradients, or change parameters, that backward is still at",
    FORWARD_WAITS_UPDATE: "the forward would read parameters whose update is still on its way",
    HOST_UPDATE_WAITS_OUTBOUND: "the host worker would update with gradients and parameters that have not arrived",
    RETURN_WAITS_HOST_UPDATE: "parameters would be sent to the device before the host worker has updated them",
    FORWARD_WAITS_RETURNED: "the forward would read parameters that have not come back from the host",
    HOST_READS_OUTBOUND: "the host would update with gradients and parameters that have not arrived",
    DEPARTURE_WAITS_GRADIENT: "a gradient would be copied out before backward has computed it",
    DEPARTURE_WAITS_ARRIVAL: "a gradient's host memory would be overwritten while a stream still fetches from it",
    DEPARTURE_WAITS_ADDITION: "a gradient's host memory would be overwritten while the host worker still adds from it",
    ADDITION_WAITS_DEPARTURE: "the host worker would add a gradient that has not arrived",
    ARRIVAL_WAITS_ADDITION: "a sum of gradients would be fetched before the host worker has made it",
    HOST_READS_SUM: "the host would read, or change, a sum of gradients that the host worker has not made",
    BACKWARD_WAITS_DEPARTURE: "backward would reuse the memory of a gradient that has not been copied out",
    ARRIVAL_WAITS_DEPARTURE: "a gradient would be fetched from the host before it has arrived there",
    ARRIVAL_WAITS_MEMORY: "a gradient would be fetched into memory that earlier work of the stream still uses",
    UPDATE_WAITS_ARRIVAL: "the update would read a gradient that has not come back",
    HOST_READS_DEPARTED: "the host would read, or change, a gradient that is still on its way",
    HOST_READS_EVICTED: "the host would read or change state that is still on its way",
    HOST_READS_SCATTERED: "the host would read or change state that the host worker has not put in its place",
}
