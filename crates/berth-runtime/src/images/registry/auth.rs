//! Registry credentials and authentication challenges: `WWW-Authenticate`, token responses. Pure.
//!
//! Implements spec 09b §4.2.

use base64::{
    Engine as _,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use serde::Deserialize;

use crate::images::{digest::Digest, error::ImageError, model};

const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Credentials from a CRI request. Never logged.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct RegistryCredentials {
    /// Name part of `Authorization: Basic`.
    pub username: String,
    /// Password for basic authentication; unused without a username.
    pub password: String,
    /// Base64 of `user:password`.
    pub auth: String,
    /// Server the credentials are for; empty: the image's registry.
    pub server_address: String,
    /// Refresh token for the token server.
    pub identity_token: String,
    /// Bearer token, sent as is.
    pub registry_token: String,
}

/// Authentication used for a host.
#[derive(Clone, PartialEq, Eq)]
pub enum RegistryAuth {
    /// No authentication.
    Anonymous,
    /// Bearer token.
    Bearer(String),
    /// Username and password.
    Basic(String, String),
    /// Refresh token, exchanged for bearer tokens.
    Refresh(String),
}

impl RegistryCredentials {
    /// Hash that distinguishes credentials without revealing them.
    pub fn key(&self) -> Digest {
        let fields = [
            &self.username,
            &self.password,
            &self.auth,
            &self.server_address,
            &self.identity_token,
            &self.registry_token,
        ];
        Digest::of(fields.map(|field| format!("{}:{field}", field.len())).concat().as_bytes())
    }

    /// Authentication for a host of an image from registry `origin`: credentials are sent only to the registry they are
    /// for.
    pub fn for_host(&self, host: &str, origin: &str) -> RegistryAuth {
        let server = server_host(&self.server_address);
        let is_meant = match server {
            "" => same_host(host, origin),
            server => same_host(host, server) || (same_host(server, origin) && same_host(host, origin)),
        };
        if !is_meant {
            return RegistryAuth::Anonymous;
        }
        if !self.registry_token.is_empty() {
            return RegistryAuth::Bearer(self.registry_token.clone());
        }
        if !self.username.is_empty() {
            return RegistryAuth::Basic(self.username.clone(), self.password.clone());
        }
        if !self.identity_token.is_empty() {
            return RegistryAuth::Refresh(self.identity_token.clone());
        }
        let decoded = BASE64.decode(self.auth.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        match decoded.as_deref().and_then(|text| text.split_once(':')) {
            Some((user, password)) => RegistryAuth::Basic(user.to_owned(), password.trim_matches('\0').to_owned()),
            None => RegistryAuth::Anonymous,
        }
    }
}

/// Host of a server address: `https://host/v1/` → `host`.
fn server_host(server: &str) -> &str {
    let rest = server.split_once("://").map_or(server, |(_, rest)| rest);
    rest.split('/').next().unwrap_or_default()
}

/// Whether two hosts are the same registry; Docker Hub has several names.
fn same_host(a: &str, b: &str) -> bool {
    let canonical = |host: &str| match host {
        "registry-1.docker.io" | "index.docker.io" => "docker.io".to_owned(),
        other => other.to_ascii_lowercase(),
    };
    canonical(a) == canonical(b)
}

/// Value of a basic `Authorization` header.
pub fn basic(user: &str, password: &str) -> String {
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}")))
}

/// An authentication challenge.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Challenge {
    /// Requires username and password.
    Basic,
    /// Requires a bearer token.
    Bearer {
        /// URL of the token server.
        realm: String,
        /// Service the token is for.
        service: String,
        /// Scope of the token; empty: unspecified.
        scope: String,
    },
}

/// Parses a `WWW-Authenticate` header; `None`: unknown scheme.
pub fn challenge(header: &str) -> Option<Challenge> {
    let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
    if scheme.eq_ignore_ascii_case("basic") {
        return Some(Challenge::Basic);
    }
    if !scheme.eq_ignore_ascii_case("bearer") {
        return None;
    }
    let (mut realm, mut service, mut scope) = (None, String::new(), String::new());
    let mut rest = rest.trim_start();
    while let Some((key, after)) = rest.split_once('=') {
        let (value, next) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => after.split_once(',').unwrap_or((after, "")),
        };
        match key.trim().to_ascii_lowercase().as_str() {
            "realm" => realm = Some(value.to_owned()),
            "service" => value.clone_into(&mut service),
            "scope" => value.clone_into(&mut scope),
            _ => {}
        }
        rest = next.trim_start_matches([',', ' ']);
    }
    Some(Challenge::Bearer { realm: realm?, service, scope })
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    token: String,
    #[serde(default)]
    access_token: String,
}

/// The token of a token server's response.
///
/// # Errors
/// The response contains no valid token.
pub fn token(answer: &[u8]) -> Result<String, ImageError> {
    let answer: Answer = model::json(answer, "response of the token server")?;
    let token = if answer.token.is_empty() { answer.access_token } else { answer.token };
    let is_good = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
    is_good.then_some(token).ok_or_else(|| ImageError::bad_content("authorization server did not include a token"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read() {
        let bearer = |realm: &str, service: &str, scope: &str| {
            Some(Challenge::Bearer { realm: realm.into(), service: service.into(), scope: scope.into() })
        };
        for (header, expected) in [
            ("Basic realm=\"x\"", Some(Challenge::Basic)),
            ("basic", Some(Challenge::Basic)),
            (
                "Bearer realm=\"https://a/t\",service=\"s\",scope=\"repository:a/b:pull,push\"",
                bearer("https://a/t", "s", "repository:a/b:pull,push"),
            ),
            ("bearer service=s, realm=https://a/t", bearer("https://a/t", "s", "")),
            ("Bearer service=\"s\"", None),
            ("Bearer realm=\"x", None),
            ("Digest realm=\"x\"", None),
            ("", None),
        ] {
            assert_eq!(challenge(header), expected, "{header}");
        }
    }

    #[test]
    fn credentials_go_to_their_registry_only() {
        let plain =
            RegistryCredentials { username: "u".into(), password: "p".into(), ..RegistryCredentials::default() };
        let meant = |server: &str| RegistryCredentials { server_address: server.into(), ..plain.clone() };
        for (credentials, host, origin, expected) in [
            (plain.clone(), "r.tld", "r.tld", true),
            (plain.clone(), "mirror.tld", "r.tld", false),
            (meant("https://mirror.tld/v2/"), "mirror.tld", "r.tld", true),
            (meant("https://mirror.tld/v2/"), "r.tld", "r.tld", false),
            (meant("https://index.docker.io/v1/"), "registry-1.docker.io", "docker.io", true),
        ] {
            let is_sent = credentials.for_host(host, origin) != RegistryAuth::Anonymous;
            assert_eq!(is_sent, expected, "{host} for {origin}");
        }
        let encoded = RegistryCredentials { auth: "dTpwAAA".into(), ..RegistryCredentials::default() };
        assert!(encoded.for_host("a", "a") == RegistryAuth::Basic("u".into(), "p".into()));
    }

    #[test]
    fn tokens_have_two_names() {
        assert_eq!(token(br#"{"token":"a"}"#).as_deref(), Ok("a"));
        assert_eq!(token(br#"{"access_token":"b","expires_in":5}"#).as_deref(), Ok("b"));
        assert!(token(b"{}").is_err() && token(b"x").is_err() && token(br#"{"token":"a\r\nb"}"#).is_err());
    }
}
