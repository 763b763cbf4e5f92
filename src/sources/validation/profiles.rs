//! Validates seccomp and AppArmor profiles, and their deprecated annotations. Pure.
//!
//! Field and annotation must match.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{
    container,
    field::{FieldErrors, Path},
    names_and_numbers::descending_path,
};
use berth_types::{api, fieldpath::quoted};

const SECCOMP_POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
const SECCOMP_CONTAINER: &str = "container.seccomp.security.alpha.kubernetes.io/";
const APPARMOR_CONTAINER: &str = "container.apparmor.security.beta.kubernetes.io/";
/// Prefix of a local profile in an annotation.
const LOCAL: &str = "localhost/";

/// Maximum length of an AppArmor profile's name, in bytes.
const APPARMOR_NAME_LIMIT: usize = 4095;

/// A profile from a field: its type and, for local ones, its name.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ProfileField<'a> {
    kind: &'a str,
    local: Option<&'a str>,
}

/// Checks all profiles of a pod.
pub fn check(meta: &ObjectMeta, spec: &api::PodSpec, errors: &mut FieldErrors) {
    if let Some(annotations) = meta.annotations.as_ref() {
        annotated(annotations, spec, &Path::root("metadata").child("annotations"), errors);
    }
    let annotation = |key: &str| meta.annotations.as_ref().and_then(|all| all.get(key)).map(String::as_str);
    let at = Path::root("spec");
    let of_pod = spec.security_context.as_ref();
    let seccomp = of_pod.and_then(|s| s.seccomp_profile.as_ref()).map(seccomp);
    let apparmor = of_pod.and_then(|s| s.app_armor_profile.as_ref()).map(apparmor);
    let at_pod = at.child("securityContext");
    seccomp_field(seccomp, &at_pod.child("seccompProfile"), errors);
    apparmor_field(apparmor, &at_pod.child("appArmorProfile"), errors);
    agree(ProfileKind::Seccomp, seccomp, annotation(SECCOMP_POD), &at_pod.child("seccompProfile"), errors);
    let is_windows = spec.os.as_ref().is_some_and(|os| os.name == "windows");
    for (at, one) in container::with_paths(spec, &at) {
        let at = at.child("securityContext");
        let own = one.security_context.as_ref();
        let own_seccomp = own.and_then(|s| s.seccomp_profile.as_ref()).map(self::seccomp);
        let own_apparmor = own.and_then(|s| s.app_armor_profile.as_ref()).map(self::apparmor);
        seccomp_field(own_seccomp, &at.child("seccompProfile"), errors);
        apparmor_field(own_apparmor, &at.child("appArmorProfile"), errors);
        let old = annotation(&format!("{SECCOMP_CONTAINER}{}", one.name));
        agree(ProfileKind::Seccomp, own_seccomp, old, &at.child("seccompProfile"), errors);
        if !is_windows {
            let old = annotation(&format!("{APPARMOR_CONTAINER}{}", one.name));
            agree(ProfileKind::AppArmor, own_apparmor.or(apparmor), old, &at.child("appArmorProfile"), errors);
        }
    }
}

fn seccomp(profile: &api::SeccompProfile) -> ProfileField<'_> {
    ProfileField { kind: &profile.type_, local: profile.localhost_profile.as_deref() }
}

fn apparmor(profile: &api::AppArmorProfile) -> ProfileField<'_> {
    ProfileField { kind: &profile.type_, local: profile.localhost_profile.as_deref() }
}

fn seccomp_field(profile: Option<ProfileField<'_>>, at: &Path, errors: &mut FieldErrors) {
    let Some(profile) = profile else { return };
    match profile.kind {
        "" => errors.required(&at.child("type"), "type is required when seccompProfile is set"),
        kind => errors.supported(&at.child("type"), kind, &["Localhost", "RuntimeDefault", "Unconfined"]),
    }
    let at = at.child("localhostProfile");
    match (profile.kind, profile.local) {
        ("Localhost", None) => errors.required(&at, "must be set when seccomp type is Localhost"),
        ("Localhost", Some(name)) => descending_path(name, &at, errors),
        (_, Some(name)) => errors.invalid(&at, name, "can only be set when seccomp type is Localhost"),
        (_, None) => {}
    }
}

fn apparmor_field(profile: Option<ProfileField<'_>>, at: &Path, errors: &mut FieldErrors) {
    let Some(profile) = profile else { return };
    let at_local = at.child("localhostProfile");
    match (profile.kind, profile.local) {
        ("Localhost", local) => {
            let name = local.unwrap_or_default();
            if name.trim() != name {
                errors.invalid(&at_local, name, "must not be padded with whitespace");
            } else if name.is_empty() {
                errors.required(&at_local, "must be set when AppArmor type is Localhost");
            }
            if name.len() > APPARMOR_NAME_LIMIT {
                errors.too_long(&at_local, APPARMOR_NAME_LIMIT);
            }
        }
        ("RuntimeDefault" | "Unconfined", Some(name)) => {
            errors.invalid(&at_local, name, "can only be set when AppArmor type is Localhost");
        }
        ("RuntimeDefault" | "Unconfined", None) => {}
        ("", _) => errors.required(&at.child("type"), "type is required when appArmorProfile is set"),
        (other, _) => {
            errors.unsupported(&at.child("type"), other, &["Localhost", "RuntimeDefault", "Unconfined"]);
        }
    }
}

/// Checks the annotations: their values, and that the containers they name exist.
fn annotated(annotations: &BTreeMap<String, String>, spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    for (key, value) in annotations {
        if key == SECCOMP_POD || key.starts_with(SECCOMP_CONTAINER) {
            let at = at.key(key);
            match value.strip_prefix(LOCAL) {
                Some(name) => descending_path(name, &at, errors),
                None if matches!(value.as_str(), "unconfined" | "runtime/default" | "docker/default") => {}
                None => errors.invalid(&at, value, "must be a valid seccomp profile"),
            }
        }
        if let Some(name) = key.strip_prefix(APPARMOR_CONTAINER) {
            let at = at.key(key);
            if !container::with_paths(spec, &at).iter().any(|(_, one)| one.name == name) {
                errors.invalid(&at, name, "container not found");
            }
            if !(matches!(value.as_str(), "" | "runtime/default" | "unconfined") || value.starts_with(LOCAL)) {
                errors.invalid(&at, value, &format!("invalid AppArmor profile name: {}", quoted(value)));
            }
        }
    }
}

/// Kind of a profile, because the deprecated names of the runtime default differ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ProfileKind {
    Seccomp,
    AppArmor,
}

/// Checks that field and annotation match, if both are set.
fn agree(
    kind: ProfileKind,
    field: Option<ProfileField<'_>>,
    annotation: Option<&str>,
    at: &Path,
    errors: &mut FieldErrors,
) {
    let (Some(field), Some(old)) = (field, annotation) else { return };
    let what = if kind == ProfileKind::Seccomp { "seccomp" } else { "apparmor" };
    let is_same_type = match field.kind {
        "Unconfined" => old == "unconfined",
        "RuntimeDefault" => old == "runtime/default" || (kind == ProfileKind::Seccomp && old == "docker/default"),
        "Localhost" => old.starts_with(LOCAL),
        _ => return,
    };
    if !is_same_type {
        errors.forbidden(&at.child("type"), &format!("{what} type in annotation and field must match"));
    } else if field.kind == "Localhost" && field.local != old.strip_prefix(LOCAL) {
        let text = format!("{what} profile in annotation and field must match");
        errors.forbidden(&at.child("localhostProfile"), &text);
    }
}
