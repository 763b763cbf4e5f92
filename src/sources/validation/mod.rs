//! Pod validation by the rules of the API server. Pure. Implements spec 02a §1.4.
//!
//! Only for static pods; the API server has validated the others. Each file checks one part of the
//! specification; errors carry the field path and are all collected. Every rule and its test:
//! `docs/validation.md`.

mod affinity;
mod container;
mod dns;
mod env;
mod field;
mod handlers;
mod metadata;
mod mounts;
mod names_and_numbers;
mod profiles;
mod projected_volumes;
mod resources;
mod security;
mod spec;
mod tolerations;
mod volume_sources;
mod volumes;
mod windows;

pub use field::{FieldError, FieldErrors, Path};

use berth_types::api;

/// All validation errors of a new pod.
pub fn new_pod(pod: &api::Pod) -> FieldErrors {
    let mut errors = FieldErrors::default();
    metadata::check(&pod.metadata, &mut errors);
    if let Some(spec) = pod.spec.as_ref() {
        spec::check(spec, &mut errors);
        profiles::check(&pod.metadata, spec, &mut errors);
    } else {
        errors.required(&Path::root("spec"), "");
    }
    errors
}

#[cfg(test)]
mod tests;
