"""The pipeline between services: the only XADD / XREADGROUP / XACK / XAUTOCLAIM of the platform.

An entry is one serialized protobuf message under the field `payload`; where traces are on, `trace` says which span it
belongs to. On a stream that all runs share, `run` names the run that the entry is counted for: `entries_in_flight`
changes in the same atomic step as the entries, and is exact whatever is redelivered or killed.

Delivery is at least once: an entry stays pending until its handler's outcome is written. `forward` writes the next hop
and acknowledges in one atomic step, and only the first of two deliveries can do it: a redelivered entry never appears
twice on the next stream. Work streams are never trimmed: trimming deletes pending entries silently.

Only invalid input becomes a dead letter (`failures`): every other failure is an outage of somebody, and the entry is
tried again for as long as it takes, while the job says what it waits for. An entry whose holders vanish is handled
alone, and given up on only when it goes on killing holders that have nothing else in hand (`Consumer`).
"""
