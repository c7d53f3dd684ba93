"""Stored weight versions by broadcast, for a trainer and replicas on one network: the fast way to the same bytes.

The files are the record; a broadcast sends a version that is stored already, tensor by tensor in the order of its
files, and whoever receives it checks the manifest's digests. One transfer is one group: whoever joined in time is in
it, and any failure ends it for all, who then take the files. No wait in it is without a deadline.
"""
