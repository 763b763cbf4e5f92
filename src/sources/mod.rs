//! Where manifests come from: file, HTTP, (later) API; normalise, validate, diff, mux.
