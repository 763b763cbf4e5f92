//! Drop-ins: `*.conf` files of a directory, merged in order over the configuration. Spec 01 §3.3.
//!
//! Merging is a JSON merge patch (RFC 7386) on the configuration with all defaults filled in, so a `null` resets a
//! field to its default. Finding and reading the files is the only I/O here.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

use super::{
    configz, defaults, document,
    fields::{API_VERSION, KIND, KubeletConfiguration},
    file_decoder,
    gates::FeatureGates,
    json_decoder::{self, Names},
    notice::Notice,
    text::quote,
};

/// Merges the drop-ins of `directory` over `base`, in order.
///
/// # Errors
/// The first file or directory that cannot be read, or a merged result that is not a valid configuration.
pub fn merge_directory(
    base: &KubeletConfiguration,
    directory: &str,
    gates: &FeatureGates,
) -> Result<(KubeletConfiguration, Vec<Notice>), String> {
    let mut notices = Vec::new();
    let files = find(directory, &mut notices).map_err(|e| walk_error(directory, &e))?;
    let texts = files.into_iter().map(|path| (path.display().to_string(), read(&path)));
    let (config, merge_notices) = merge_texts(base, directory, texts, gates)?;
    notices.extend(merge_notices);
    Ok((config, notices))
}

/// Merges drop-ins over `base`, in order; each is a path with its text or the error of reading it.
///
/// # Errors
/// The first text that is not a drop-in, or a merged result that is not a valid configuration.
pub fn merge_texts(
    base: &KubeletConfiguration,
    directory: &str,
    texts: impl IntoIterator<Item = (String, Result<String, String>)>,
    gates: &FeatureGates,
) -> Result<(KubeletConfiguration, Vec<Notice>), String> {
    let mut notices = Vec::new();
    let mut merged = configz::to_json(base);
    for (name, text) in texts {
        let failed =
            |cause: &str| walk_error(directory, &format!("failed to load kubelet dropin file, path: {name}{cause}"));
        let text =
            text.map_err(|e| failed(&format!(", error: failed to load Kubelet config file {name}, error {e}")))?;
        let patch = read_dropin(&text).map_err(|e| match e {
            DropinError::Unreadable(e) => {
                failed(&format!(", error: failed to load Kubelet config file {name}, error {e}"))
            }
            DropinError::Foreign { version, kind } => {
                failed(&format!(", unknown apiVersion/kind: {version}, Kind={kind}"))
            }
        })?;
        notices.extend(notices_of(&name, &patch, &merged));
        merge(&mut merged, &patch);
    }
    let config = finish(&merged, gates)?;
    Ok((config, notices))
}

fn walk_error(directory: &str, cause: &str) -> String {
    format!("failed to walk through kubelet dropin directory {}: {cause}", quote(directory))
}

/// Reason for which a text is not a drop-in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DropinError {
    /// The document is malformed, has duplicate keys, or has no kind.
    Unreadable(String),
    /// The document is of another type.
    Foreign {
        /// `apiVersion` of the document.
        version: String,
        /// `kind` of the document.
        kind: String,
    },
}

/// Parses the text of a drop-in. Duplicate keys are fatal here, unknown fields are not. Never panics.
///
/// # Errors
/// The text is not a drop-in.
pub fn read_dropin(text: &str) -> Result<Map<String, Value>, DropinError> {
    let unreadable = |e: String| DropinError::Unreadable(format!("failed to decode: {e}"));
    let document = document::parse(text).map_err(|e| unreadable(e.to_string()))?;
    if !document.duplicates.is_empty() {
        return Err(unreadable(format!("strict decoding error: {}", document.duplicates.join(", "))));
    }
    let Value::Object(mut fields) = document.value else {
        return Err(unreadable(format!("Object 'Kind' is missing in '{text}'")));
    };
    let named = |field: &str| fields.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (kind, version) = (named("kind"), named("apiVersion"));
    if kind.is_empty() {
        return Err(unreadable(format!("Object 'Kind' is missing in '{text}'")));
    }
    // The reference prints an empty group and version as a slash.
    let version = if version.is_empty() { "/".to_owned() } else { version };
    if kind != KIND || version != API_VERSION {
        return Err(DropinError::Foreign { version, kind });
    }
    fields.retain(|name, _| name != "kind" && name != "apiVersion");
    Ok(fields)
}

/// Applies a merge patch (RFC 7386): objects merge, other values replace, `null` deletes.
fn merge(target: &mut Value, patch: &Map<String, Value>) {
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Some(fields) = target.as_object_mut() else { return };
    for (name, value) in patch {
        match value {
            Value::Null => {
                fields.shift_remove(name);
            }
            Value::Object(inner) => merge(fields.entry(name.clone()).or_insert(Value::Null), inner),
            other => {
                fields.insert(name.clone(), other.clone());
            }
        }
    }
}

fn finish(merged: &Value, gates: &FeatureGates) -> Result<KubeletConfiguration, String> {
    let unmarshal =
        |e: &dyn std::fmt::Display| format!("failed to unmarshal merged JSON into kubelet configuration: {e}");
    let typed = json_decoder::decode::<KubeletConfiguration>(merged, Names::AnyCase).map_err(|e| unmarshal(&e))?;
    let mut config = typed.value;
    defaults::fill(&mut config, &typed.present, gates).map_err(|e| e.to_string())?;
    Ok(config)
}

/// Returns the notices about one file: the fields it sets, unknown fields, and fields that come too late.
fn notices_of(path: &str, patch: &Map<String, Value>, base: &Value) -> Vec<Notice> {
    let unknown = |names| {
        let typed = json_decoder::decode::<KubeletConfiguration>(&Value::Object(patch.clone()), names);
        typed.map(|typed| typed.unknown).unwrap_or_default().into_iter().map(|unknown| unknown.path)
    };
    let strangers: Vec<String> = unknown(Names::AnyCase).collect();
    let unknown: Vec<String> =
        unknown(Names::Exact).filter(|path| strangers.contains(path) || loses_to_another_case(base, path)).collect();
    let fields = patch.keys().filter(|name| !unknown.contains(name)).cloned().collect();
    let mut notices = vec![Notice::AppliedDropin { path: path.to_owned(), fields, unknown }];
    for (field, keeps) in [
        ("nodeStatusUpdateFrequency", "nodeStatusReportFrequency"),
        ("maxParallelImagePulls", "serializeImagePulls"),
        ("mergeDefaultEvictionSettings", "evictionHard"),
    ] {
        if patch.contains_key(field) && !patch.contains_key(keeps) {
            notices.push(Notice::LateDefault { path: path.to_owned(), field, keeps });
        }
    }
    notices
}

/// Whether the field is present in another case: after merging, that one is decoded, and the drop-in's has no effect.
fn loses_to_another_case(base: &Value, path: &str) -> bool {
    let (parents, name) = path.rsplit_once('.').unwrap_or(("", path));
    let parent = parents.split('.').filter(|name| !name.is_empty()).try_fold(base, |value, name| value.get(name));
    let Some(fields) = parent.and_then(Value::as_object) else { return false };
    fields.keys().any(|known| known != name && known.eq_ignore_ascii_case(name))
}

/// Finds the drop-ins below `directory`: depth first, in byte order, files and directories interleaved. Symbolic links
/// to files are followed, links to directories are not.
fn find(directory: &str, notices: &mut Vec<Notice>) -> Result<Vec<PathBuf>, String> {
    let to_message = |e: &io::Error| format!("lstat {directory}: {}", errno_text(e));
    let root = fs::symlink_metadata(directory).map_err(|e| to_message(&e))?;
    let mut files = Vec::new();
    if root.is_dir() {
        walk(Path::new(directory), &mut files, notices).map_err(|e| to_message(&e))?;
    } else {
        notices.push(Notice::LinkedDropinDirectory { path: directory.to_owned() });
    }
    Ok(files)
}

fn walk(directory: &Path, files: &mut Vec<PathBuf>, notices: &mut Vec<Notice>) -> io::Result<()> {
    let mut entries = fs::read_dir(directory)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            walk(&path, files, notices)?;
        } else if entry.file_name().as_encoded_bytes().ends_with(b".conf") {
            files.push(path);
        } else if path.is_dir() {
            notices.push(Notice::LinkedDropinDirectory { path: path.display().to_string() });
        } else {
            notices.push(Notice::SkippedDropin { path: path.display().to_string() });
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, String> {
    let shown = quote(&path.display().to_string());
    let bytes = fs::read(path).map_err(|e| {
        format!("failed to read kubelet config file {shown}, error: open {}: {}", path.display(), errno_text(&e))
    })?;
    if bytes.is_empty() {
        return Err(format!("kubelet config file {shown} was empty"));
    }
    String::from_utf8(bytes).map_err(|_| file_decoder::NOT_UTF8.to_owned())
}

/// The kernel's error text in Go's lower case.
pub(super) fn errno_text(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        io::ErrorKind::IsADirectory => "is a directory".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

    fn merged(
        base: &KubeletConfiguration,
        bodies: &[(&str, &str)],
    ) -> Result<(KubeletConfiguration, Vec<Notice>), String> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for (name, text) in bodies {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().expect("below the directory")).expect("created");
            fs::write(path, text).expect("written");
        }
        let root = dir.path().display().to_string();
        merge_directory(base, &root, &FeatureGates::new()).map_err(|e| e.replace(&root, "DIR"))
    }

    fn with(body: &str) -> String {
        format!("{HEAD}{body}")
    }

    #[test]
    fn files_merge_in_order_and_only_conf_files() {
        let base =
            KubeletConfiguration { port: 9090, cluster_dns: vec!["a".into(), "b".into()], ..defaults::defaults() };
        let (config, notices) = merged(
            &base,
            &[
                ("10.conf", &with("kubeReserved: {memory: 150Mi, cpu: 200m}\nport: 0\n")),
                ("15/05.conf", &with("kubeReserved: {memory: 120Mi}\nmaxPods: 5\n")),
                ("20.conf", &with("kubeReserved: {memory: 100Mi}\nclusterDNS: [x]\nHEALTHZPORT: 7\n")),
                ("30.yaml", &with("maxPods: 9\n")),
            ],
        )
        .expect("good drop-ins");
        let reserved =
            BTreeMap::from([("cpu".to_owned(), "200m".to_owned()), ("memory".to_owned(), "100Mi".to_owned())]);
        assert_eq!(config.kube_reserved, reserved, "AC-01-9");
        assert_eq!(config.port, 10_250, "AC-01-10");
        assert_eq!(config.cluster_dns, ["x"], "AC-01-11");
        assert_eq!(config.max_pods, 5, "AC-01-14");
        assert_eq!(config.healthz_port, 10_248, "the exact name stands before the one in another case");
        let applied: Vec<_> = notices
            .iter()
            .filter_map(|notice| match notice {
                Notice::AppliedDropin { fields, unknown, .. } => Some((fields.join(" "), unknown.join(" "))),
                _ => None,
            })
            .collect();
        let lost = ("clusterDNS kubeReserved".to_owned(), "HEALTHZPORT".to_owned());
        assert_eq!(applied.get(2), Some(&lost), "keys without effect are reported: {applied:?}");
        assert!(notices.iter().any(|n| matches!(n, Notice::SkippedDropin { path } if path.ends_with("30.yaml"))));
    }

    #[test]
    fn null_restores_the_default_and_late_defaults_are_reported() {
        let base = KubeletConfiguration { max_pods: 7, serialize_image_pulls: true, ..defaults::defaults() };
        let (config, notices) =
            merged(&base, &[("a.conf", &with("maxPods: null\nmaxParallelImagePulls: 3\n"))]).expect("good");
        assert_eq!((config.max_pods, config.serialize_image_pulls), (110, true));
        assert!(notices.iter().any(|n| matches!(n, Notice::LateDefault { keeps: "serializeImagePulls", .. })));
    }

    #[test]
    fn bad_drop_ins_are_fatal() {
        let base = defaults::defaults();
        let walk = "failed to walk through kubelet dropin directory \"DIR\": ";
        let load = "failed to load kubelet dropin file, path: DIR/a.conf";
        for (text, error) in [
            // AC-01-12
            (
                "apiVersion: kubelet.config.k8s.io/v1beta2\nkind: KubeletConfiguration\n".to_owned(),
                format!(
                    "{walk}{load}, unknown apiVersion/kind: kubelet.config.k8s.io/v1beta2, Kind=KubeletConfiguration"
                ),
            ),
            // AC-01-13
            (
                "apiVersion: kubelet.config.k8s.io/v1beta1\n".to_owned(),
                format!(
                    "{walk}{load}, error: failed to load Kubelet config file DIR/a.conf, error failed to decode: \
                     Object 'Kind' is missing in 'apiVersion: kubelet.config.k8s.io/v1beta1\n'"
                ),
            ),
            (
                "kind: KubeletConfiguration\n".to_owned(),
                format!("{walk}{load}, unknown apiVersion/kind: /, Kind=KubeletConfiguration"),
            ),
            (
                String::new(),
                format!(
                    "{walk}{load}, error: failed to load Kubelet config file DIR/a.conf, error kubelet config file \
                     \"DIR/a.conf\" was empty"
                ),
            ),
            (
                with("port: 1\nport: 2\n"),
                format!(
                    "{walk}{load}, error: failed to load Kubelet config file DIR/a.conf, error failed to decode: strict \
                     decoding error: yaml: unmarshal errors:\n  line 4: key \"port\" already set in map"
                ),
            ),
            (
                with("port: x\n"),
                "failed to unmarshal merged JSON into kubelet configuration: json: cannot unmarshal string into Go \
                 struct field KubeletConfiguration.port of type int32"
                    .to_owned(),
            ),
        ] {
            assert_eq!(merged(&base, &[("a.conf", &text)]).map(drop), Err(error), "{text}");
        }
        let missing = merge_directory(&base, "/nonexistent/d", &FeatureGates::new()).map(drop);
        assert_eq!(
            missing,
            Err("failed to walk through kubelet dropin directory \"/nonexistent/d\": lstat /nonexistent/d: no such file \
                 or directory"
                .to_owned())
        );
    }

    #[test]
    fn a_linked_directory_loads_nothing_and_a_linked_file_does() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("real")).expect("created");
        fs::write(at("real/a.conf"), with("maxPods: 3\n")).expect("written");
        std::os::unix::fs::symlink(at("real"), at("link")).expect("linked");
        fs::create_dir_all(at("files")).expect("created");
        std::os::unix::fs::symlink(at("real/a.conf"), at("files/b.conf")).expect("linked");
        std::os::unix::fs::symlink(at("real"), at("files/sub")).expect("linked");
        let pods = |name: &str| {
            let path = at(name).display().to_string();
            merge_directory(&defaults::defaults(), &path, &FeatureGates::new()).expect("readable")
        };
        assert_eq!(pods("link").0.max_pods, 110);
        assert!(matches!(pods("link").1[..], [Notice::LinkedDropinDirectory { .. }]));
        let (config, notices) = pods("files");
        assert_eq!(config.max_pods, 3);
        assert!(notices.iter().any(|n| matches!(n, Notice::LinkedDropinDirectory { path } if path.ends_with("sub"))));
    }
}
