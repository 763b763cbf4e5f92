//! Seccomp and AppArmor profiles, and their old annotations, which must agree. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{
    field::{FieldErrors, Path},
    names_and_numbers::descending_path,
};
use crate::pod::api;

const SECCOMP_POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
const SECCOMP_CONTAINER: &str = "container.seccomp.security.alpha.kubernetes.io/";
const APPARMOR_CONTAINER: &str = "container.apparmor.security.beta.kubernetes.io/";

/// Longest name of an AppArmor profile, bytes.
const APPARMOR_NAME_LIMIT: usize = 4095;

/// A profile in either notation: its type and, for local ones, its name.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Profile<'a> {
    kind: &'a str,
    local: Option<&'a str>,
}

/// Checks all profiles of a pod.
pub fn check(meta: &ObjectMeta, spec: &api::PodSpec, errors: &mut FieldErrors) {
    let annotation = |key: &str| meta.annotations.as_ref().and_then(|all| all.get(key)).map(String::as_str);
    let at = Path::root("spec");
    let of_pod = spec.security_context.as_ref();
    let seccomp = of_pod.and_then(|s| s.seccomp_profile.as_ref()).map(seccomp);
    let apparmor = of_pod.and_then(|s| s.app_armor_profile.as_ref()).map(apparmor);
    let at_pod = at.child("securityContext");
    fields("seccomp", seccomp, &at_pod.child("seccompProfile"), errors);
    fields("AppArmor", apparmor, &at_pod.child("appArmorProfile"), errors);
    agree("seccomp", seccomp, annotation(SECCOMP_POD), &at_pod.child("seccompProfile"), errors);
    let lists = [("containers", Some(&spec.containers)), ("initContainers", spec.init_containers.as_ref())];
    for (list, containers) in lists {
        for (i, one) in containers.into_iter().flatten().enumerate() {
            let at = at.child(list).index(i).child("securityContext");
            let own = one.security_context.as_ref();
            let own_seccomp = own.and_then(|s| s.seccomp_profile.as_ref()).map(self::seccomp);
            let own_apparmor = own.and_then(|s| s.app_armor_profile.as_ref()).map(self::apparmor);
            fields("seccomp", own_seccomp, &at.child("seccompProfile"), errors);
            fields("AppArmor", own_apparmor, &at.child("appArmorProfile"), errors);
            let old = annotation(&format!("{SECCOMP_CONTAINER}{}", one.name));
            agree("seccomp", own_seccomp, old, &at.child("seccompProfile"), errors);
            let old = annotation(&format!("{APPARMOR_CONTAINER}{}", one.name));
            agree("apparmor", own_apparmor.or(apparmor), old, &at.child("appArmorProfile"), errors);
        }
    }
}

fn seccomp(profile: &api::SeccompProfile) -> Profile<'_> {
    Profile { kind: &profile.type_, local: profile.localhost_profile.as_deref() }
}

fn apparmor(profile: &api::AppArmorProfile) -> Profile<'_> {
    Profile { kind: &profile.type_, local: profile.localhost_profile.as_deref() }
}

fn fields(what: &str, profile: Option<Profile<'_>>, at: &Path, errors: &mut FieldErrors) {
    let Some(profile) = profile else { return };
    errors.one_of(&at.child("type"), Some(profile.kind), &["Localhost", "RuntimeDefault", "Unconfined"]);
    let name = profile.local.unwrap_or_default();
    match profile.kind {
        "Localhost" if profile.local.is_none() || (what == "AppArmor" && name.is_empty()) => {
            errors.required(&at.child("localhostProfile"), &format!("must be set when {what} type is Localhost"));
        }
        "Localhost" if what == "AppArmor" => {
            let at = at.child("localhostProfile");
            if name.trim() != name {
                errors.invalid(&at, name, "must not be padded with whitespace");
            }
            if name.len() > APPARMOR_NAME_LIMIT {
                errors.too_long(&at, APPARMOR_NAME_LIMIT);
            }
        }
        "Localhost" => descending_path(name, &at.child("localhostProfile"), errors),
        _ if profile.local.is_some() => {
            let text = format!("can only be set when {what} type is Localhost");
            errors.invalid(&at.child("localhostProfile"), name, &text);
        }
        _ => {}
    }
}

/// The field and the annotation, where both are there.
fn agree(what: &str, field: Option<Profile<'_>>, annotation: Option<&str>, at: &Path, errors: &mut FieldErrors) {
    let (Some(field), Some(text)) = (field, annotation) else { return };
    let old = match text {
        "unconfined" => Profile { kind: "Unconfined", local: None },
        "runtime/default" | "docker/default" => Profile { kind: "RuntimeDefault", local: None },
        other => match other.strip_prefix("localhost/") {
            Some(name) => Profile { kind: "Localhost", local: Some(name) },
            None => return,
        },
    };
    if field.kind != old.kind {
        errors.forbidden(&at.child("type"), &format!("{what} type in annotation and field must match"));
    } else if field.kind == "Localhost" && field.local != old.local {
        let text = format!("{what} profile in annotation and field must match");
        errors.forbidden(&at.child("localhostProfile"), &text);
    }
}
