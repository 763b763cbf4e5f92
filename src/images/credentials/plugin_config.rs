//! Credential provider plugin configuration: decoding and validation. Pure.
//!
//! Error texts are upstream's. Implements spec 01 §15, 03b §2.3.

use std::{collections::BTreeMap, time::Duration};

use serde::Deserialize;

use berth_config::{
    GoDuration, document,
    json_decoder::{self, Names},
    text::quote,
};
use berth_types::names::qualified_name;

/// The configuration is invalid; the process exits at start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PluginConfigError(pub String);

/// Supported API versions of plugins, sorted as upstream lists them.
const PLUGIN_APIS: [&str; 3] = [
    "credentialprovider.kubelet.k8s.io/v1",
    "credentialprovider.kubelet.k8s.io/v1alpha1",
    "credentialprovider.kubelet.k8s.io/v1beta1",
];
const CONFIG_APIS: [&str; 3] =
    ["kubelet.config.k8s.io/v1", "kubelet.config.k8s.io/v1beta1", "kubelet.config.k8s.io/v1alpha1"];
const KIND: &str = "CredentialProviderConfig";

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct File {
    #[allow(dead_code, reason = "checked before, and part of the strict schema")]
    kind: String,
    api_version: String,
    providers: Vec<RawProvider>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct RawProvider {
    name: String,
    match_images: Vec<String>,
    default_cache_duration: Option<GoDuration>,
    api_version: String,
    args: Vec<String>,
    env: Vec<EnvVar>,
    token_attributes: Option<TokenAttributes>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct EnvVar {
    name: String,
    value: String,
}

/// Service account parameters of a plugin.
#[derive(Deserialize, Default, Clone, PartialEq, Eq, Debug)]
#[serde(default, rename_all = "camelCase")]
pub struct TokenAttributes {
    service_account_token_audience: String,
    cache_type: String,
    require_service_account: Option<bool>,
    required_service_account_annotation_keys: Vec<String>,
    optional_service_account_annotation_keys: Vec<String>,
}

impl TokenAttributes {
    /// Whether the plugin is skipped for pods without a service account.
    pub fn requires_account(&self) -> bool {
        self.require_service_account == Some(true)
    }

    /// Audience of the token.
    pub fn audience(&self) -> &str {
        &self.service_account_token_audience
    }

    /// Whether responses are cached per token, instead of per service account.
    pub fn is_cached_by_token(&self) -> bool {
        self.cache_type == "Token"
    }

    /// The requested annotations of a service account; `None` if a required one is missing.
    pub fn chosen(&self, annotations: &BTreeMap<String, String>) -> Option<BTreeMap<String, String>> {
        let of = |key: &String| annotations.get(key).map(|value| (key.clone(), value.clone()));
        let must: Option<BTreeMap<_, _>> = self.required_service_account_annotation_keys.iter().map(of).collect();
        let mut chosen = must?;
        chosen.extend(self.optional_service_account_annotation_keys.iter().filter_map(of));
        Some(chosen)
    }
}

/// A validated plugin configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Provider {
    /// Name of the binary.
    pub name: String,
    /// Patterns of images that the plugin is called for.
    pub match_images: Vec<String>,
    /// Cache duration of responses that do not specify one.
    pub default_cache: Duration,
    /// API version of requests and responses.
    pub api_version: String,
    /// Command line arguments.
    pub args: Vec<String>,
    /// Environment variables added to the agent's own environment.
    pub env: Vec<(String, String)>,
    /// Service account parameters; `None` if the plugin is called without identity.
    pub token: Option<TokenAttributes>,
}

/// Parses the texts of all files, in order, and validates their providers together.
///
/// # Errors
/// The first file that cannot be decoded, or a duplicate name; otherwise all validation errors as one
/// text.
pub fn load(texts: &[String]) -> Result<Vec<Provider>, PluginConfigError> {
    let mut raw: Vec<RawProvider> = Vec::new();
    for text in texts {
        let file = decode(text).map_err(PluginConfigError)?;
        for provider in file.providers {
            if raw.iter().any(|known| known.name == provider.name) {
                let name = quote(&provider.name);
                let text = format!("duplicate provider name {name} found in configuration file(s)");
                return Err(PluginConfigError(text));
            }
            raw.push(provider);
        }
    }
    let errors = validate(&raw);
    match errors.as_slice() {
        [] => Ok(raw.into_iter().map(checked).collect()),
        [one] => Err(PluginConfigError(format!("failed to validate config: {one}"))),
        several => Err(PluginConfigError(format!("failed to validate config: [{}]", several.join(", ")))),
    }
}

/// Decodes strictly, without upstream's lenient fallback.
fn decode(text: &str) -> Result<File, String> {
    let document = document::parse(text).map_err(|e| e.to_string())?;
    let header = |field: &str| document.value.get(field).and_then(|v| v.as_str()).unwrap_or_default().to_owned();
    let (kind, version) = (header("kind"), header("apiVersion"));
    if kind != KIND || !CONFIG_APIS.contains(&version.as_str()) {
        return Err(format!("no kind {} is registered for version {}", quote(&kind), quote(&version)));
    }
    let decoded = json_decoder::decode::<File>(&document.value, Names::Exact).map_err(|e| e.to_string())?;
    let unknown = decoded.unknown.iter().map(|field| format!("unknown field {}", quote(&field.path)));
    let mut errors: Vec<String> = document.duplicates.iter().cloned().chain(unknown).collect();
    if decoded.value.api_version != CONFIG_APIS[0] {
        let tokens = decoded.value.providers.iter().enumerate().filter(|(_, p)| p.token_attributes.is_some());
        errors.extend(tokens.map(|(at, _)| format!("unknown field \"providers[{at}].tokenAttributes\"")));
    }
    if errors.is_empty() { Ok(decoded.value) } else { Err(format!("strict decoding error: {}", errors.join(", "))) }
}

fn checked(raw: RawProvider) -> Provider {
    Provider {
        name: raw.name,
        match_images: raw.match_images,
        default_cache: raw.default_cache_duration.unwrap_or_default().std(),
        api_version: raw.api_version,
        args: raw.args,
        env: raw.env.into_iter().map(|var| (var.name, var.value)).collect(),
        token: raw.token_attributes,
    }
}

fn validate(providers: &[RawProvider]) -> Vec<String> {
    if providers.is_empty() {
        return vec!["providers: Required value: at least 1 item in plugins is required".to_owned()];
    }
    providers.iter().flat_map(validate_one).collect()
}

fn validate_one(provider: &RawProvider) -> Vec<String> {
    let mut errors = validate_name(&provider.name);
    if provider.api_version.is_empty() {
        errors.push("providers.apiVersion: Required value".to_owned());
    } else if !PLUGIN_APIS.contains(&provider.api_version.as_str()) {
        let supported: Vec<String> = PLUGIN_APIS.iter().map(|api| quote(api)).collect();
        let version = quote(&provider.api_version);
        let supported = supported.join(", ");
        errors.push(format!("providers.apiVersion: Unsupported value: {version}: supported values: {supported}"));
    }
    if provider.match_images.is_empty() {
        errors.push("providers.matchImages: Required value: at least 1 item in matchImages is required".to_owned());
    }
    for pattern in &provider.match_images {
        if let Some(problem) = bad_pattern(pattern) {
            let pattern = quote(pattern);
            errors.push(format!("providers.matchImages: Invalid value: {pattern}: match image is invalid: {problem}"));
        }
    }
    match provider.default_cache_duration {
        None => errors.push("providers.defaultCacheDuration: Required value".to_owned()),
        Some(duration) if duration.nanos() < 0 => {
            let path = "providers.defaultCacheDuration";
            errors.push(format!("{path}: Invalid value: \"{duration}\": must be greater than or equal to 0"));
        }
        Some(_) => {}
    }
    if let Some(token) = &provider.token_attributes {
        errors.extend(validate_token(token, &provider.api_version));
    }
    errors
}

fn validate_name(name: &str) -> Vec<String> {
    let rules = [
        (name.contains('/'), "contain '/'"),
        (name.contains(' '), "contain spaces"),
        (name == ".", "be '.'"),
        (name == "..", "be '..'"),
    ];
    let broken = rules.iter().filter(|(broken, _)| *broken);
    let mut errors: Vec<String> = broken
        .map(|(_, rule)| format!("providers.name: Invalid value: {}: provider name cannot {rule}", quote(name)))
        .collect();
    if name.is_empty() {
        errors.push("providers.name: Required value".to_owned());
    }
    errors
}

fn validate_token(token: &TokenAttributes, api: &str) -> Vec<String> {
    let path = "providers.tokenAttributes";
    let mut errors = Vec::new();
    if api != PLUGIN_APIS[0] {
        errors.push(format!("{path}: Forbidden: tokenAttributes is only supported for {} API version", PLUGIN_APIS[0]));
    }
    let mut required = |missing: bool, field: &str| {
        if missing {
            errors.push(format!("{path}.{field}: Required value"));
        }
    };
    required(token.service_account_token_audience.is_empty(), "serviceAccountTokenAudience");
    required(token.require_service_account.is_none(), "requireServiceAccount");
    required(token.cache_type.is_empty(), "cacheType");
    if !matches!(token.cache_type.as_str(), "" | "Token" | "ServiceAccount") {
        let kind = quote(&token.cache_type);
        let supported = "supported values: \"ServiceAccount\", \"Token\"";
        errors.push(format!("{path}.cacheType: Unsupported value: {kind}: {supported}"));
    }
    let (must, may) =
        (&token.required_service_account_annotation_keys, &token.optional_service_account_annotation_keys);
    if token.require_service_account == Some(false) && !must.is_empty() {
        errors.push(format!(
            "{path}.requiredServiceAccountAnnotationKeys: Forbidden: requireServiceAccount cannot be false when \
             requiredServiceAccountAnnotationKeys is set"
        ));
    }
    errors.extend(validate_keys(must, &format!("{path}.requiredServiceAccountAnnotationKeys")));
    errors.extend(validate_keys(may, &format!("{path}.optionalServiceAccountAnnotationKeys")));
    let both: Vec<String> = must.iter().filter(|key| may.contains(key)).map(|key| quote(key)).collect();
    if !both.is_empty() {
        errors.push(format!(
            "{path}: Invalid value: [{}]: annotation keys cannot be both required and optional",
            both.join(", ")
        ));
    }
    errors
}

fn validate_keys(keys: &[String], path: &str) -> Vec<String> {
    let mut errors = Vec::new();
    for (at, key) in keys.iter().enumerate() {
        let complaints = qualified_name(&key.to_lowercase());
        errors.extend(complaints.iter().map(|c| format!("{path}: Invalid value: {}: {c}", quote(key))));
        if keys.get(..at).is_some_and(|before| before.contains(key)) {
            errors.push(format!("{path}: Duplicate value: {}", quote(key)));
        }
    }
    errors
}

/// Why a pattern is not a valid address, with the texts of Go's URL parser.
fn bad_pattern(pattern: &str) -> Option<String> {
    let url = quote(&format!("https://{pattern}"));
    let (authority, path) = pattern.split_once('/').map_or((pattern, ""), |(host, path)| (host, path));
    let fault = |text: String| Some(format!("parse {url}: {text}"));
    if pattern.chars().any(|c| c.is_ascii_control()) {
        return fault("net/url: invalid control character in URL".to_owned());
    }
    let bracketed = authority.starts_with('[');
    if bracketed && !authority.contains(']') {
        return fault("missing ']' in host".to_owned());
    }
    let after = if bracketed { authority.rsplit_once(']').map_or("", |(_, rest)| rest) } else { authority };
    if let Some((_, port)) = after.rsplit_once(':')
        && !port.bytes().all(|b| b.is_ascii_digit())
    {
        return fault(format!("invalid port {} after host", quote(&format!(":{port}"))));
    }
    if let Some(c) = authority.chars().find(|c| matches!(c, ' ' | '"' | '<' | '>' | '\\' | '^' | '`' | '{' | '|' | '}'))
    {
        return fault(format!("invalid character {} in host name", quote(&c.to_string())));
    }
    bad_escape(path).and_then(|escape| fault(format!("invalid URL escape {}", quote(escape))))
}

fn bad_escape(path: &str) -> Option<&str> {
    path.match_indices('%').find_map(|(at, _)| {
        let end = path.char_indices().map(|(i, _)| i).find(|&i| i >= at + 3).unwrap_or(path.len());
        let escape = path.get(at..end)?;
        let fine = escape.len() == 3 && escape.bytes().skip(1).all(|b| b.is_ascii_hexdigit());
        (!fine).then_some(escape)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const API: &str = "credentialprovider.kubelet.k8s.io/v1";

    fn file(version: &str, providers: &str) -> String {
        format!("kind: CredentialProviderConfig\napiVersion: kubelet.config.k8s.io/{version}\nproviders: {providers}\n")
    }

    fn provider(fields: &str) -> String {
        format!("{{name: acr, matchImages: ['*.acr.io'], defaultCacheDuration: 10m, apiVersion: {API}, {fields}}}")
    }

    fn text(texts: &[String]) -> String {
        load(texts).err().map(|e| e.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_file_is_read() {
        let yaml = file("v1", &format!("[{}]", provider("args: [get], env: [{name: A, value: b}]")));
        let read = load(&[yaml]).expect("valid");
        assert_eq!(
            read,
            [Provider {
                name: "acr".into(),
                match_images: vec!["*.acr.io".into()],
                default_cache: Duration::from_secs(600),
                api_version: API.into(),
                args: vec!["get".into()],
                env: vec![("A".into(), "b".into())],
                token: None,
            }]
        );
    }

    #[test]
    fn invalid_fields_give_upstream_errors() {
        let with = |field: &str, value: &str| {
            let fields =
                [("name", "acr"), ("matchImages", "[a.io]"), ("defaultCacheDuration", "1m"), ("apiVersion", API)];
            let fields: Vec<String> = fields
                .iter()
                .map(|(name, given)| if *name == field { (*name, value) } else { (*name, *given) })
                .filter(|(_, value)| !value.is_empty())
                .map(|(name, value)| format!("{name}: {value}"))
                .collect();
            file("v1", &format!("[{{{}}}]", fields.join(", ")))
        };
        let rows = [
            (file("v1", "[]"), "providers: Required value: at least 1 item in plugins is required"),
            (with("name", "'a/b'"), "providers.name: Invalid value: \"a/b\": provider name cannot contain '/'"),
            (with("name", "'a b'"), "providers.name: Invalid value: \"a b\": provider name cannot contain spaces"),
            (with("name", "'.'"), "providers.name: Invalid value: \".\": provider name cannot be '.'"),
            (with("name", "'..'"), "providers.name: Invalid value: \"..\": provider name cannot be '..'"),
            (with("apiVersion", ""), "providers.apiVersion: Required value"),
            (
                with("apiVersion", "x/v1"),
                "providers.apiVersion: Unsupported value: \"x/v1\": supported values: \
                 \"credentialprovider.kubelet.k8s.io/v1\", \"credentialprovider.kubelet.k8s.io/v1alpha1\", \
                 \"credentialprovider.kubelet.k8s.io/v1beta1\"",
            ),
            (
                with("matchImages", "[]"),
                "providers.matchImages: Required value: at least 1 item in matchImages is required",
            ),
            (
                with("matchImages", "['a:b']"),
                "providers.matchImages: Invalid value: \"a:b\": match image is invalid: parse \"https://a:b\": \
                 invalid port \":b\" after host",
            ),
            (
                with("matchImages", "['a/%zz']"),
                "providers.matchImages: Invalid value: \"a/%zz\": match image is invalid: parse \"https://a/%zz\": \
                 invalid URL escape \"%zz\"",
            ),
            (with("defaultCacheDuration", ""), "providers.defaultCacheDuration: Required value"),
            (
                with("defaultCacheDuration", "-1s"),
                "providers.defaultCacheDuration: Invalid value: \"-1s\": must be greater than or equal to 0",
            ),
        ];
        for (yaml, expected) in rows {
            assert_eq!(text(&[yaml]), format!("failed to validate config: {expected}"));
        }
        let two = file("v1", "[{name: a, matchImages: [a.io], apiVersion: x}]");
        assert!(text(&[two]).starts_with("failed to validate config: [providers.apiVersion: Unsupported"));
    }

    #[test]
    fn files_are_strict_and_names_unique() {
        let one = file("v1", &format!("[{}]", provider("")));
        assert_eq!(text(&[one.clone(), one.clone()]), "duplicate provider name \"acr\" found in configuration file(s)");
        let unknown = file("v1", &format!("[{}]", provider("colour: red")));
        assert_eq!(text(&[unknown]), "strict decoding error: unknown field \"providers[0].colour\"");
        let token = "tokenAttributes: {serviceAccountTokenAudience: a, cacheType: Token, requireServiceAccount: true}";
        let old = file("v1beta1", &format!("[{}]", provider(token)));
        assert_eq!(text(&[old]), "strict decoding error: unknown field \"providers[0].tokenAttributes\"");
        assert_eq!(text(&[file("v1", &format!("[{}]", provider(token)))]), "");
        let kind = one.replace("CredentialProviderConfig", "Other");
        assert_eq!(text(&[kind]), "no kind \"Other\" is registered for version \"kubelet.config.k8s.io/v1\"");
    }

    #[test]
    fn token_attributes_have_rules() {
        let check = |attributes: &str, expected: &[&str]| {
            let yaml = file("v1", &format!("[{}]", provider(&format!("tokenAttributes: {{{attributes}}}"))));
            let errors = text(&[yaml]);
            for part in expected {
                assert!(errors.contains(part), "{errors}");
            }
        };
        check(
            "serviceAccountTokenAudience: ''",
            &[
                "tokenAttributes.serviceAccountTokenAudience: Required value",
                "tokenAttributes.requireServiceAccount: Required value",
                "tokenAttributes.cacheType: Required value",
            ],
        );
        let base = "serviceAccountTokenAudience: a, cacheType: Token, requireServiceAccount: false";
        check(
            &format!("{base}, requiredServiceAccountAnnotationKeys: [a/b]"),
            &["requireServiceAccount cannot be false"],
        );
        check(
            &format!("{base}, optionalServiceAccountAnnotationKeys: [a/b, a/b, 'x/y/z']"),
            &["Duplicate value: \"a/b\"", "Invalid value: \"x/y/z\""],
        );
        check(&base.replace("Token,", "Other,"), &["Unsupported value: \"Other\""]);
    }
}
