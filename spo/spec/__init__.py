"""The sections of a JobSpec, one file per part of the platform that reads them."""
