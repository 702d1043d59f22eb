"""Model runners: a base class over small parts, and one subclass per kind of device."""
