"""Who may do what at the REST door: keys, tokens of an identity provider, scopes, tenants, rates, and the audit log."""
