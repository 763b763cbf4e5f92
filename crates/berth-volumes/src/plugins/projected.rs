//! projected volumes: several sources in one directory, such as a pod's token, CA, and namespace.
//!
//! All sources are tried, and their errors are reported together; a later source replaces an earlier one at the same
//! path. Implements spec 07 §7.5.

use super::{
    SetUp, SetUpError, downward_api,
    files::{self, ObjectOf, ObjectProjection},
};
use crate::{
    api_objects,
    atomic_writer::{FileProjection, Payload},
    layout::PROJECTED,
    ownership,
};
use berth_ports::{Credential, MountedVolume, ObjectError, TokenRequest};
use berth_types::{Pod, api};

/// Mode of a credential that is owned by a user or group: no access for others.
const PRIVATE: u32 = 0o600;

/// Writes or refreshes the files.
pub fn set_up(request: &SetUp<'_>) -> Result<MountedVolume, SetUpError> {
    let source = request.volume.projected.clone().unwrap_or_default();
    let mode = files::default_mode(source.default_mode)?;
    let (mut payload, mut errors) = (Payload::new(), Vec::new());
    for (index, source) in source.sources.iter().flatten().enumerate() {
        match of_source(request, (index, source), mode) {
            Ok(files) => payload.extend(files),
            Err(SetUpError::Object(ObjectError::NoClient { .. })) => {
                return Err(SetUpError::NotConfigured(request.volume.name.clone()));
            }
            Err(e) => errors.push(e),
        }
    }
    if !errors.is_empty() {
        return Err(SetUpError::Several(errors));
    }
    files::publish(request, PROJECTED, &payload)
}

fn of_source(
    request: &SetUp<'_>,
    (index, source): (usize, &api::VolumeProjection),
    mode: u32,
) -> Result<Payload, SetUpError> {
    if let Some(config_map) = &source.config_map {
        let reference = ObjectProjection {
            of: ObjectOf::ConfigMap,
            name: &config_map.name,
            items: config_map.items.as_deref().unwrap_or_default(),
            optional: config_map.optional == Some(true),
        };
        return files::of_object(request, &reference, mode);
    }
    if let Some(secret) = &source.secret {
        let reference = ObjectProjection {
            of: ObjectOf::Secret,
            name: &secret.name,
            items: secret.items.as_deref().unwrap_or_default(),
            optional: secret.optional == Some(true),
        };
        return files::of_object(request, &reference, mode);
    }
    if let Some(downward) = &source.downward_api {
        return downward_api::payload(request, downward.items.as_deref().unwrap_or_default(), mode);
    }
    if let Some(token) = &source.service_account_token {
        return of_token(request, token, mode);
    }
    if let Some(bundle) = &source.cluster_trust_bundle {
        if bundle.name.is_none() && bundle.signer_name.is_none() {
            return Err(SetUpError::NoBundleNamed);
        }
        let data = request.fetched.trust_bundle(bundle).map_err(SetUpError::Object)?.into_bytes();
        return Ok([(bundle.path.clone(), private(request, data, mode))].into());
    }
    if let Some(certificate) = &source.pod_certificate {
        let credential = request.fetched.certificate(&request.volume.name, index).map_err(SetUpError::Object)?;
        return Ok(of_certificate(request, certificate, &credential, mode));
    }
    Ok(Payload::new())
}

/// Returns the files with the private key and the certificate chain, combined or separate.
fn of_certificate(
    request: &SetUp<'_>,
    wanted: &api::PodCertificateProjection,
    credential: &Credential,
    mode: u32,
) -> Payload {
    let Credential { key, chain } = credential;
    let files = [
        (&wanted.credential_bundle_path, format!("{key}{chain}")),
        (&wanted.key_path, key.clone()),
        (&wanted.certificate_chain_path, chain.clone()),
    ];
    let named = files.into_iter().filter_map(|(path, text)| Some((path.clone().filter(|p| !p.is_empty())?, text)));
    named.map(|(path, text)| (path, private(request, text.into_bytes(), mode))).collect()
}

fn of_token(request: &SetUp<'_>, token: &api::ServiceAccountTokenProjection, mode: u32) -> Result<Payload, SetUpError> {
    let ask: TokenRequest = api_objects::token_of(token);
    let data = request.fetched.token(&ask).map_err(SetUpError::Object)?.into_bytes();
    Ok([(token.path.clone(), private(request, data, mode))].into())
}

/// Returns the file of a credential, owned by the pod's user or group if it has one.
fn private(request: &SetUp<'_>, data: Vec<u8>, mode: u32) -> FileProjection {
    let owner = common_user(request.pod);
    let is_given = owner.is_some() || ownership::group_of(request.pod).is_some();
    FileProjection { data, mode: if is_given { PRIVATE } else { mode }, owner }
}

/// Returns the UID that all containers run as; `None` if one sets none or a different one.
pub fn common_user(pod: &Pod) -> Option<u32> {
    let of_pod = pod.spec().security_context.as_ref().and_then(|context| context.run_as_user);
    let of = |container: &api::Container| {
        container.security_context.as_ref().and_then(|context| context.run_as_user).or(of_pod)
    };
    let mut users = pod.init_containers().iter().chain(pod.containers()).map(of);
    let first = users.next()??;
    users.all(|user| user == Some(first)).then(|| u32::try_from(first).ok()).flatten()
}
