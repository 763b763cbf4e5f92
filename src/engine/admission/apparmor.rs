//! Admission handler for AppArmor: refuses profiles that the host cannot enforce.
//!
//! Pure. Implements spec 02a §6.1.

use super::{Admission, AdmissionRejection, AdmitInput};
use berth_types::{Pod, api};

/// Prefix of the deprecated annotation that still names the profile of a static pod's container.
const ANNOTATION_PREFIX: &str = "container.apparmor.security.beta.kubernetes.io/";

pub(super) fn check(input: &AdmitInput<'_>, _: &mut Admission) -> Result<(), AdmissionRejection> {
    // A pod past `Pending` was checked before.
    if input.pod.api_phase() != "Pending" {
        return Ok(());
    }
    let wanted = profiles(input.pod);
    let problem = if wanted.iter().all(|p| p.kind == "Unconfined") {
        return Ok(());
    } else if !input.rules.apparmor_enabled {
        "AppArmor is not enabled on the host".to_owned()
    } else if let Some(empty) = wanted.iter().find(|p| p.kind == "Localhost" && p.name.trim().is_empty()) {
        let name = if empty.is_named { "*" } else { "nil" };
        format!(
            "invalid empty AppArmor profile name: \"&AppArmorProfile{{Type:Localhost,LocalhostProfile:{name}{},}}\"",
            empty.name
        )
    } else {
        return Ok(());
    };
    Err(AdmissionRejection::new("AppArmor", format!("Cannot enforce AppArmor: {problem}")))
}

struct EffectiveProfile {
    kind: String,
    name: String,
    is_named: bool,
}

/// The effective profile of each container: its own field, else the annotation, else the pod's field.
fn profiles(pod: &Pod) -> Vec<EffectiveProfile> {
    let of_pod = pod.spec().security_context.as_ref().and_then(|s| s.app_armor_profile.as_ref());
    let regular = pod.init_containers().iter().chain(pod.containers()).map(|c| (&c.name, &c.security_context));
    let ephemeral = pod.ephemeral_containers().iter().map(|c| (&c.name, &c.security_context));
    regular
        .chain(ephemeral)
        .filter_map(|(name, context)| {
            let own = context.as_ref().and_then(|s| s.app_armor_profile.as_ref()).map(from_field);
            own.or_else(|| from_annotation(pod, name)).or_else(|| of_pod.map(from_field))
        })
        .collect()
}

fn from_field(profile: &api::AppArmorProfile) -> EffectiveProfile {
    EffectiveProfile {
        kind: profile.type_.clone(),
        name: profile.localhost_profile.clone().unwrap_or_default(),
        is_named: profile.localhost_profile.is_some(),
    }
}

fn from_annotation(pod: &Pod, container: &str) -> Option<EffectiveProfile> {
    let (kind, name) = match pod.annotation(&format!("{ANNOTATION_PREFIX}{container}"))? {
        "" => return None,
        "unconfined" => ("Unconfined", ""),
        "runtime/default" => ("RuntimeDefault", ""),
        other => ("Localhost", other.strip_prefix("localhost/")?),
    };
    Some(EffectiveProfile { kind: kind.to_owned(), name: name.to_owned(), is_named: true })
}
