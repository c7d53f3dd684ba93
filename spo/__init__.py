"""The shared library of all services: contract, algorithm, plumbing, command line and SDK. It imports no service."""
