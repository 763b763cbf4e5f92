//! Who may ask us: listeners and routes.
