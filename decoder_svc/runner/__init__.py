"""Model runners: one thin base class over small parts, one subclass per kind of device."""
