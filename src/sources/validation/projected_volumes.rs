//! Validates projected volumes: several sources in one directory. Pure.

use std::collections::BTreeSet;

use super::{
    field::{FieldErrors, Path},
    names_and_numbers::{file_mode, projected_path},
    volumes::{downward_items, key_items},
};
use berth_types::api;

/// Minimum lifetime of a token, in seconds.
const MIN_TOKEN_SECONDS: i64 = 600;
/// Maximum lifetime of a token, in seconds.
const MAX_TOKEN_SECONDS: i64 = 1 << 32;

/// Checks a projected volume; `has_account`: whether the pod has a service account.
pub fn check(projected: &api::ProjectedVolumeSource, has_account: bool, at: &Path, errors: &mut FieldErrors) {
    file_mode(projected.default_mode, &at.child("defaultMode"), errors);
    let mut paths = BTreeSet::new();
    for (i, part) in projected.sources.iter().flatten().enumerate() {
        for (value, path) in file_paths(part) {
            if !path.is_empty() && !paths.insert(path) {
                errors.invalid(at, value, "conflicting duplicate paths");
            }
        }
        let at = at.child("sources").index(i);
        if types(part) > 1 {
            errors.forbidden(&at, "may not specify more than 1 volume type per source");
        }
        source(part, has_account, &at, errors);
    }
}

fn types(part: &api::VolumeProjection) -> usize {
    [
        part.cluster_trust_bundle.is_some(),
        part.config_map.is_some(),
        part.downward_api.is_some(),
        part.pod_certificate.is_some(),
        part.secret.is_some(),
        part.service_account_token.is_some(),
    ]
    .into_iter()
    .filter(|is_set| *is_set)
    .count()
}

fn source(part: &api::VolumeProjection, has_account: bool, at: &Path, errors: &mut FieldErrors) {
    for (member, name, items) in [
        part.secret.as_ref().map(|source| ("secret", &source.name, &source.items)),
        part.config_map.as_ref().map(|source| ("configMap", &source.name, &source.items)),
    ]
    .into_iter()
    .flatten()
    {
        let at = at.child(member);
        if name.is_empty() {
            errors.required(&at.child("name"), "");
        }
        key_items(items.as_deref().unwrap_or_default(), &at.child("items"), errors);
    }
    if let Some(downward) = part.downward_api.as_ref() {
        let at = at.child("downwardAPI").child("items");
        downward_items(downward.items.as_deref().unwrap_or_default(), &at, errors);
    }
    if let Some(token) = part.service_account_token.as_ref() {
        let at = at.child("serviceAccountToken");
        let at_lifetime = at.child("expirationSeconds");
        let seconds = token.expiration_seconds.unwrap_or(0);
        if seconds < MIN_TOKEN_SECONDS {
            errors.invalid(&at_lifetime, seconds, "may not specify a duration less than 10 minutes");
        }
        if seconds > MAX_TOKEN_SECONDS {
            errors.invalid(&at_lifetime, seconds, "may not specify a duration larger than 2^32 seconds");
        }
        projected_path(&token.path, &at.child("path"), errors);
        if !has_account {
            errors.forbidden(&at, "must not be specified when serviceAccountName is not set");
        }
    }
}

/// File paths of one source, each with the value shown in an error. Paths of tokens are not compared
/// with others, as by the API server.
fn file_paths(part: &api::VolumeProjection) -> Vec<(&str, &str)> {
    let mut paths = Vec::new();
    for (name, items) in [
        part.secret.as_ref().map(|source| (source.name.as_str(), &source.items)),
        part.config_map.as_ref().map(|source| (source.name.as_str(), &source.items)),
    ]
    .into_iter()
    .flatten()
    {
        paths.extend(items.iter().flatten().map(|item| (name, item.path.as_str())));
    }
    if let Some(downward) = part.downward_api.as_ref() {
        paths.extend(downward.items.iter().flatten().map(|item| (item.path.as_str(), item.path.as_str())));
    }
    paths
}
