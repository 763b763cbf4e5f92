//! Keyring of a pod's image pull secrets (spec 03b §2.1-2.2). Pure.

use super::{
    CredentialSource,
    docker::{DockerConfigError, Keyring, parse_config_json, parse_dockercfg},
};
use berth_ports::PullSecret;

/// Builds the keyring of a pod's secrets. Secrets of other types, or without data, are ignored.
///
/// # Errors
/// A malformed secret fails the whole lookup.
pub fn keyring(secrets: &[PullSecret]) -> Result<Keyring<CredentialSource>, DockerConfigError> {
    let mut keyring = Keyring::default();
    for secret in secrets.iter().filter(|secret| !secret.data.is_empty()) {
        let config = match secret.kind.as_str() {
            "kubernetes.io/dockerconfigjson" => parse_config_json(&secret.data)?,
            "kubernetes.io/dockercfg" => parse_dockercfg(&secret.data)?,
            _ => continue,
        };
        let (namespace, name, uid) = secret.coordinates.clone();
        keyring.add(&config, &CredentialSource::Secret { namespace, name, uid });
    }
    Ok(keyring)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(kind: &str, data: &str) -> PullSecret {
        let coordinates = ("ns".to_owned(), "s".to_owned(), "u".to_owned());
        PullSecret { coordinates, kind: kind.to_owned(), data: data.as_bytes().to_vec() }
    }

    #[test]
    fn both_kinds_are_read_and_junk_spoils_all() {
        let json = secret("kubernetes.io/dockerconfigjson", r#"{"auths":{"r.io":{"username":"a"}}}"#);
        let old = secret("kubernetes.io/dockercfg", r#"{"r.io":{"username":"b"}}"#);
        let (other, empty) = (secret("Opaque", "junk"), secret("kubernetes.io/dockercfg", ""));
        let found = keyring(&[json, other, old, empty]).expect("readable").find("r.io/x");
        let users: Vec<&str> = found.iter().map(|(login, _)| login.username.as_str()).collect();
        assert_eq!(users, ["a", "b"]);
        assert!(keyring(&[secret("kubernetes.io/dockercfg", "junk")]).is_err());
    }
}
