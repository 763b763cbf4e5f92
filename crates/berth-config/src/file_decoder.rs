//! Decodes the main configuration file, strictly first, then leniently. Pure.
//!
//! An unknown field, a field in the wrong case, or a duplicate field is a strict error. Strict errors are tolerated
//! with a warning; a wrong type is not (spec 01 §3.2).

use serde_json::Value;

use super::{
    defaults,
    document::{self, ParsedDocument},
    fields::{API_VERSION, KIND, KubeletConfiguration},
    gates::FeatureGates,
    json_decoder::{self, Names, PresentFields, UnknownField},
    notice::Notice,
    text::{clean_path, quote},
};

const SCHEME: &str = "k8s.io/kubernetes/pkg/kubelet/apis/config/scheme/scheme.go:33";

/// Error of a file that is not UTF-8.
pub(super) const NOT_UTF8: &str = "failed to decode: error converting YAML to JSON: yaml: invalid leading UTF-8 octet";

/// A decoded file before defaulting.
#[derive(Debug)]
pub struct DecodedFile {
    /// The decoded configuration.
    pub config: KubeletConfiguration,
    /// Fields that the file sets.
    pub present: PresentFields,
    /// Strict errors, if there are any.
    pub strict: Option<Strict>,
}

/// Strict errors of a file that was decoded leniently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strict {
    /// Error text of the reference.
    pub error: String,
    /// Unknown fields and the fields they probably meant.
    pub hints: Vec<String>,
}

/// Decodes the text of a main file; never panics, whatever the text.
///
/// # Errors
/// The file is unusable; contains the reference's text.
pub fn decode(text: &str) -> Result<DecodedFile, String> {
    let document = document::parse(text).map_err(|e| format!("failed to decode: {}", no_version(&e.to_string())))?;
    check_type(&document.value, text).map_err(|e| format!("failed to decode: {e}"))?;
    let typed = json_decoder::decode::<KubeletConfiguration>(&document.value, Names::Exact)
        .map_err(|e| format!("failed to decode: {e}"))?;
    Ok(DecodedFile { config: typed.value, present: typed.present, strict: strict(&document, &typed.unknown) })
}

/// Decodes a main file in `directory` (absolute) and fills in defaults.
///
/// # Errors
/// The file is unusable; contains the reference's text.
pub fn main_file(
    text: &str,
    directory: &str,
    gates: &FeatureGates,
) -> Result<(KubeletConfiguration, Vec<Notice>), String> {
    let DecodedFile { mut config, present, strict } = decode(text)?;
    defaults::fill(&mut config, &present, gates).map_err(|e| e.to_string())?;
    resolve_paths(&mut config, directory);
    defaults::fill_hard_eviction(&mut config, present.has("evictionHard"));
    let notices = strict.map(|Strict { error, hints }| Notice::LenientDecoding { error, hints });
    Ok((config, notices.into_iter().collect()))
}

/// Whether the text of a main file sets a top-level field.
pub fn sets(text: &str, field: &str) -> bool {
    document::parse(text).is_ok_and(|document| document.value.get(field).is_some_and(|value| !value.is_null()))
}

fn no_version(error: &str) -> String {
    format!("couldn't get version/kind; json parse error: {error}")
}

/// Checks `kind` and `apiVersion` of the document.
fn check_type(document: &Value, text: &str) -> Result<(), String> {
    let Value::Object(fields) = document else {
        let kind = if document.is_array() { "array" } else { "string" };
        return Err(no_version(&format!("json: cannot unmarshal {kind} into Go value of type struct")));
    };
    let named = |field: &str| match fields.get(field) {
        None | Some(Value::Null) => Ok(""),
        Some(Value::String(text)) => Ok(text.as_str()),
        Some(_) => Err(no_version(&format!("{field} is not a string"))),
    };
    let (kind, version) = (named("kind")?, named("apiVersion")?);
    match (kind, version) {
        ("", _) => Err(format!("Object 'Kind' is missing in '{text}'")),
        (_, "") => Err(format!("Object 'apiVersion' is missing in '{text}'")),
        (KIND, API_VERSION) => Ok(()),
        _ => Err(format!(
            "no kind {} is registered for version {} in scheme {}",
            quote(kind),
            quote(version),
            quote(SCHEME)
        )),
    }
}

fn strict(document: &ParsedDocument, unknown: &[UnknownField]) -> Option<Strict> {
    let errors: Vec<String> = document
        .duplicates
        .iter()
        .cloned()
        .chain(unknown.iter().map(|unknown| format!("unknown field {}", quote(&unknown.path))))
        .collect();
    let hint =
        |unknown: &UnknownField| unknown.nearest.as_ref().map(|near| format!("{}: did you mean {near}?", unknown.path));
    (!errors.is_empty()).then(|| Strict {
        error: format!("strict decoding error: {}", errors.join(", ")),
        hints: unknown.iter().filter_map(hint).collect(),
    })
}

/// Resolves relative paths of the main file against its directory, not the working directory.
fn resolve_paths(config: &mut KubeletConfiguration, directory: &str) {
    for path in [
        &mut config.static_pod_path,
        &mut config.authentication.x509.client_ca_file,
        &mut config.tls_cert_file,
        &mut config.tls_private_key_file,
        &mut config.resolv_conf,
        &mut config.volume_plugin_dir,
        &mut config.pod_logs_dir,
    ] {
        if !path.is_empty() && !path.starts_with('/') {
            *path = clean_path(&format!("{directory}/{path}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

    fn main(body: &str) -> Result<(KubeletConfiguration, Vec<Notice>), String> {
        main_file(&format!("{HEAD}{body}"), "/etc/k", &FeatureGates::new())
    }

    #[test]
    fn a_bare_file_is_the_defaults() {
        let (config, notices) = main("").expect("AC-01-4");
        let mut golden = defaults::defaults();
        golden.eviction_hard = defaults::hard_eviction();
        assert_eq!(config, golden);
        assert_eq!(notices, []);
    }

    #[test]
    fn strict_errors_alone_are_forgiven() {
        for (body, error) in [
            ("foo: 1\n", "strict decoding error: unknown field \"foo\""), // AC-01-6
            ("MaxPods: 3\n", "strict decoding error: unknown field \"MaxPods\""),
            (
                "port: 1\nport: 2\n",
                "strict decoding error: yaml: unmarshal errors:\n  line 4: key \"port\" already set in map",
            ),
            (
                "zz: 1\nauthentication:\n  foo: 2\n",
                "strict decoding error: unknown field \"authentication.foo\", unknown field \"zz\"",
            ),
        ] {
            let (_, notices) = main(body).expect(body);
            let [Notice::LenientDecoding { error: found, .. }] = &notices[..] else { panic!("{notices:?}") };
            assert_eq!(found, error);
        }
        assert_eq!(main("port: 1\nport: 2\n").map(|(c, _)| c.port), Ok(2));
        assert_eq!(main("MaxPods: 3\n").map(|(c, _)| c.max_pods), Ok(110));
    }

    #[test]
    fn what_cannot_be_read_is_fatal() {
        for (text, error) in [
            (
                "kind: KubeletConfiguration\n",
                "failed to decode: Object 'apiVersion' is missing in 'kind: KubeletConfiguration\n'",
            ),
            ("foo: 1\n", "failed to decode: Object 'Kind' is missing in 'foo: 1\n'"),
            (
                "apiVersion: kubelet.config.k8s.io/v1\nkind: KubeletConfiguration\n",
                "failed to decode: no kind \"KubeletConfiguration\" is registered for version \
                 \"kubelet.config.k8s.io/v1\" in scheme \"k8s.io/kubernetes/pkg/kubelet/apis/config/scheme/scheme.go:33\"",
            ),
            (
                &format!("{HEAD}port: ten\n"),
                "failed to decode: json: cannot unmarshal string into Go struct field KubeletConfiguration.port of type int32",
            ),
            // AC-01-7
            (
                &format!("{HEAD}syncFrequency: 60\n"),
                "failed to decode: json: cannot unmarshal number into Go value of type string",
            ),
        ] {
            assert_eq!(decode(text).map(drop), Err(error.to_owned()), "{text}");
        }
        for text in ["- a\n", "just words", "a: [", "\u{0}", "kind: [x]\n", "{\"kind\": 1}"] {
            assert!(decode(text).is_err_and(|e| e.starts_with("failed to decode: ")), "{text:?}");
        }
    }

    #[test]
    fn relative_paths_start_at_the_file() {
        let (config, _) = main("staticPodPath: pods\npodLogsDir: ../logs\nresolvConf: \"\"\ntlsCertFile: /abs/c.pem\n")
            .expect("AC-01-8");
        assert_eq!(config.static_pod_path, "/etc/k/pods");
        assert_eq!((config.pod_logs_dir.as_str(), config.resolv_conf.as_str()), ("/etc/logs", ""));
        assert_eq!(config.tls_cert_file, "/abs/c.pem");
    }

    proptest::proptest! {
        /// Foreign bytes never panic, whatever they are.
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC*", key in "[a-zA-Z]{1,12}", value in "[\\[\\]{}:,\"'a-z0-9 .-]{0,20}") {
            let _ = decode(&text);
            let _ = decode(&format!("{HEAD}{key}: {value}\n"));
            let _ = crate::dropins::read_dropin(&format!("{HEAD}{text}"));
        }
    }
}
