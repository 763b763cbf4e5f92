//! Fuzz targets: image references, registry credentials, and image pull records.

use std::collections::BTreeMap;

use berth::images::{
    credentials::{docker, glob, hash, plugin_api, plugin_config},
    record_documents, reference,
};

use super::{first_line, text};

/// An image reference.
pub fn image_reference(data: &[u8]) {
    let text = text(data);
    let Ok((tagged, parsed)) = reference::with_default_tag(&text) else { return };
    let canonical = parsed.canonical();
    let again = reference::ImageReference::parse(&canonical).expect("the canonical form is a reference");
    assert_eq!(again.canonical(), canonical);
    assert_eq!((&again.repository, &again.digest), (&parsed.repository, &parsed.digest));
    assert_eq!(reference::ImageReference::parse(&tagged).map(|r| r.canonical()), Ok(canonical));
}

/// Docker's configuration, as `config.json` and `.dockercfg`.
pub fn docker_config(data: &[u8]) {
    for logins in [docker::parse_config_json(data), docker::parse_dockercfg(data)].into_iter().flatten() {
        let mut ring = docker::Keyring::default();
        ring.add(&logins, &());
        for image in ["docker.io/library/busybox", "registry.example.com:5000/team/app", "quay.io/x/y"] {
            assert!(ring.find(image).len() <= logins.len());
        }
        for login in logins.values() {
            assert_eq!(hash::credential_hash(login).len(), 64);
        }
        let entry = |login: &docker::Login| serde_json::json!({"username": login.username, "password": login.password, "email": login.email});
        let entries: BTreeMap<&String, serde_json::Value> = logins.iter().map(|(k, v)| (k, entry(v))).collect();
        let written = serde_json::to_vec(&serde_json::json!({ "auths": entries })).expect("texts serialise");
        assert_eq!(docker::parse_config_json(&written), Ok(logins), "written and read");
    }
}

/// A registry pattern, and on the second line an image.
pub fn image_pattern(data: &[u8]) {
    let (pattern, image) = first_line(data);
    let image = text(image);
    glob::matches(&pattern, &image);
    if !image.contains(['*', '?', '[', '\\']) {
        assert!(glob::matches(&image, &image), "a name without wildcards covers itself");
    }
}

/// Credential provider configuration; files are separated by lines of `%%`.
pub fn plugins(data: &[u8]) {
    let files: Vec<String> = text(data).split("\n%%\n").map(str::to_owned).collect();
    let Ok(providers) = plugin_config::load(&files) else { return };
    assert!(!providers.is_empty());
    for provider in providers {
        assert!(!provider.name.contains('/') && !matches!(provider.name.as_str(), "" | "." | ".."), "a file name");
        assert!(!provider.match_images.is_empty());
    }
}

/// Output of a credential provider plugin.
pub fn plugin_response(data: &[u8]) {
    let version = "credentialprovider.kubelet.k8s.io/v1";
    match plugin_api::parse(version, data) {
        Ok(answer) => drop(answer.logins),
        Err(error) => assert!(error.to_string().len() < 256, "the response is not quoted"),
    }
}

/// A pull record file of the image manager.
pub fn pull_record(data: &[u8]) {
    if let Ok(intent) = record_documents::decode_intent(data) {
        let again = record_documents::decode_intent(&record_documents::encode_intent(&intent.value))
            .expect("what we write, we read");
        assert_eq!((again.value, again.outdated), (intent.value, false));
    }
    if let Ok(pulled) = record_documents::decode_pulled(data) {
        let written = record_documents::encode_pulled(&pulled.value);
        let again = record_documents::decode_pulled(&written).expect("what we write, we read");
        assert!(!again.outdated);
        assert_eq!(record_documents::encode_pulled(&again.value), written);
        for mut grants in pulled.value.grants.into_values() {
            grants.add(&record_documents::Proof::Node);
            assert!(grants.node && grants.secrets.is_empty() && grants.accounts.is_empty());
        }
    }
}
