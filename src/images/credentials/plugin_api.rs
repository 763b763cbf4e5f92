//! Credential provider plugin API: request and response documents (spec 03b §2.3). Pure.
//!
//! No content of a response ever gets into an error text.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    docker::{DockerConfig, Login},
    plugin_caller::Caller,
};
use berth_config::GoDuration;

#[derive(Serialize)]
struct CredentialProviderRequest<'a> {
    kind: &'static str,
    #[serde(rename = "apiVersion")]
    api_version: &'a str,
    image: &'a str,
    #[serde(rename = "serviceAccountToken", skip_serializing_if = "str::is_empty")]
    token: &'a str,
    #[serde(rename = "serviceAccountAnnotations", skip_serializing_if = "BTreeMap::is_empty")]
    annotations: &'a BTreeMap<String, String>,
}

/// Encodes the request.
pub fn request(api_version: &str, image: &str, caller: &Caller) -> Vec<u8> {
    let (token, annotations) = (caller.token.as_str(), &caller.annotations);
    let request =
        CredentialProviderRequest { kind: "CredentialProviderRequest", api_version, image, token, annotations };
    serde_json::to_vec(&request).expect("strings always serialize")
}

/// Images that a response applies to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// The requested image.
    Image,
    /// All images of its registry.
    Registry,
    /// All images.
    Global,
}

/// A parsed response.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PluginResponse {
    /// Images that it applies to.
    pub scope: Scope,
    /// Cache duration; `None` if not specified.
    pub keep: Option<Duration>,
    /// Logins by registry pattern.
    pub logins: DockerConfig,
}

/// Why a response is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// The response cannot be decoded.
    #[error("error decoding credential provider plugin response from stdout")]
    Undecodable,
    /// The API version differs from that of the request.
    #[error("apiVersion from credential plugin response did not match the expected apiVersion")]
    ApiVersion,
    /// The scope is unknown.
    #[error("credential provider plugin did not return a valid cacheKeyType")]
    CacheKeyType,
}

#[derive(Deserialize)]
struct Response {
    kind: String,
    #[serde(rename = "apiVersion")]
    api_version: String,
    #[serde(rename = "cacheKeyType", default)]
    cache_key_type: String,
    #[serde(rename = "cacheDuration", default)]
    cache_duration: Option<String>,
    #[serde(default)]
    auth: Option<BTreeMap<String, Auth>>,
}

#[derive(Deserialize, Default)]
struct Auth {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
}

/// Parses the output of a plugin.
///
/// # Errors
/// The output is not a valid response in that API version.
pub fn parse(api_version: &str, stdout: &[u8]) -> Result<PluginResponse, AnswerError> {
    let response: Response = serde_json::from_slice(stdout).map_err(|_| AnswerError::Undecodable)?;
    if response.kind != "CredentialProviderResponse" {
        return Err(AnswerError::Undecodable);
    }
    if response.api_version != api_version {
        return Err(AnswerError::ApiVersion);
    }
    let scope = match response.cache_key_type.as_str() {
        "Image" => Scope::Image,
        "Registry" => Scope::Registry,
        "Global" => Scope::Global,
        _ => return Err(AnswerError::CacheKeyType),
    };
    let duration = response.cache_duration.map(|text| text.parse::<GoDuration>());
    let keep = duration.transpose().map_err(|_| AnswerError::Undecodable)?.map(GoDuration::std);
    let login = |auth: Auth| Login { username: auth.username, password: auth.password, email: String::new() };
    let logins = response.auth.unwrap_or_default().into_iter().map(|(pattern, auth)| (pattern, login(auth))).collect();
    Ok(PluginResponse { scope, keep, logins })
}

#[cfg(test)]
mod tests {
    use super::*;

    const API: &str = "credentialprovider.kubelet.k8s.io/v1";

    #[test]
    fn questions_and_answers() {
        let asked = String::from_utf8(request(API, "r.io/x", &Caller::default())).expect("text");
        let expected =
            format!("{{\"kind\":\"CredentialProviderRequest\",\"apiVersion\":\"{API}\",\"image\":\"r.io/x\"}}");
        assert_eq!(asked, expected);
        let annotations = [("a/b".to_owned(), "c".to_owned())].into();
        let caller = Caller { token: "t".to_owned(), annotations, ..Caller::default() };
        let asked = String::from_utf8(request(API, "r.io/x", &caller)).expect("text");
        let end = ",\"image\":\"r.io/x\",\"serviceAccountToken\":\"t\",\"serviceAccountAnnotations\":{\"a/b\":\"c\"}}";
        assert!(asked.ends_with(end), "{asked}");
        let response = format!(
            "{{\"kind\":\"CredentialProviderResponse\",\"apiVersion\":\"{API}\",\"cacheKeyType\":\"Registry\",\
             \"cacheDuration\":\"5m\",\"auth\":{{\"*.io\":{{\"username\":\"u\",\"password\":\"secret\"}}}}}}"
        );
        let answer = parse(API, response.as_bytes()).expect("an answer");
        assert_eq!((answer.scope, answer.keep), (Scope::Registry, Some(Duration::from_secs(300))));
        assert_eq!(answer.logins["*.io"].username, "u");
        let refused = |change: &str, to: &str| {
            parse(API, response.replace(change, to).as_bytes()).expect_err("refused").to_string()
        };
        assert_eq!(refused("Registry", "Planet"), "credential provider plugin did not return a valid cacheKeyType");
        assert!(refused("io/v1\"", "io/v1beta1\"").starts_with("apiVersion from credential plugin response"));
        // AC-03b-14
        for junk in [refused("{\"kind", "secret{"), refused("5m", "secret"), refused("Response", "Request")] {
            assert_eq!(junk, "error decoding credential provider plugin response from stdout");
        }
    }
}
