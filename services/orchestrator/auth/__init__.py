"""Who asks and what they may do: API keys, OpenID Connect, scopes, tenants, the audit log."""
