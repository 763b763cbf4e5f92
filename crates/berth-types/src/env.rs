//! Builds the environment variables of a container from objects that were read before. Pure.
//!
//! The caller determines the required objects with [`references`], reads them, and calls [`build`]. Order, precedence,
//! and texts: spec 02b §10. The result is in declared order, followed by the service variables, which are sorted (the
//! reference's order is random).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use super::{
    api,
    env_file::{self, EnvFileError},
    expansion::{LONGEST_LIST, TooLong, expand},
    service_env::service_variables,
};

/// Result of reading a ConfigMap or Secret.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ObjectRead<T> {
    /// The data of the object.
    Found(Arc<T>),
    /// The object does not exist; the text is the error of a reference that is not optional.
    Absent(String),
    /// The object could not be read, or there is no API client: an error even if the reference is optional.
    Failed(String),
}

/// Result of reading an env file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReadFile {
    /// The content of the file.
    Text(String),
    /// The pod has no such volume, or the volume is not mounted.
    NoVolume,
    /// The file could not be read; the text is the cause.
    Failed(String),
}

/// Objects that a container's environment refers to, in the pod's namespace.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct References {
    /// Names of the ConfigMaps.
    pub config_maps: BTreeSet<String>,
    /// Names of the Secrets.
    pub secrets: BTreeSet<String>,
    /// Env files: volume name, and path relative to the volume.
    pub files: BTreeSet<(String, String)>,
}

/// Inputs of the environment of one container.
pub struct EnvInputs<'a> {
    /// Namespace of the pod.
    pub namespace: &'a str,
    /// Variables of devices and claims; all declared variables override them.
    pub devices: &'a [(String, String)],
    /// `spec.enableServiceLinks`.
    pub service_links: Option<bool>,
    /// Known services; `None` until the list has been read once. For a static pod: the services known so far, or an
    /// empty list.
    pub services: Option<&'a [Arc<api::Service>]>,
    /// ConfigMaps by name.
    pub config_maps: &'a HashMap<String, ObjectRead<BTreeMap<String, String>>>,
    /// Secrets by name.
    pub secrets: &'a HashMap<String, ObjectRead<BTreeMap<String, Vec<u8>>>>,
    /// Env files by volume and path.
    pub files: &'a HashMap<(String, String), ReadFile>,
    /// Resolves a `fieldRef` to its value or error text.
    pub field: &'a dyn Fn(&api::ObjectFieldSelector) -> Result<String, String>,
    /// Resolves a `resourceFieldRef` to its value or error text.
    pub resource: &'a dyn Fn(&api::ResourceFieldSelector) -> Result<String, String>,
}

/// Error of building an environment: the message of `CreateContainerConfigError`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EnvError {
    /// The pod was not defaulted: `enableServiceLinks` is unset.
    #[error("nil pod.spec.enableServiceLinks encountered, cannot construct envvars")]
    NoServiceLinks,
    /// The services have not been read yet.
    #[error("services have not yet been read at least once, cannot construct envvars")]
    NoServices,
    /// The variables, single or together, exceed the size that any runtime accepts.
    #[error(transparent)]
    TooLong(#[from] TooLong),
    /// An object cannot be read, or a field or resource has no value.
    #[error("{0}")]
    Unreadable(String),
    /// A ConfigMap or Secret lacks the key.
    #[error("couldn't find key {key} in {kind} {namespace}/{name}")]
    NoKey {
        /// Requested key of the ConfigMap or Secret.
        key: String,
        /// `ConfigMap` or `Secret`.
        kind: &'static str,
        /// Namespace of the object.
        namespace: String,
        /// Name of the object.
        name: String,
    },
    /// A Secret's value is not UTF-8, which CRI cannot carry.
    #[error("key {key} in Secret {namespace}/{name} is not valid UTF-8, cannot construct envvars")]
    NotText {
        /// Key of the Secret whose value is not UTF-8.
        key: String,
        /// Namespace of the Secret.
        namespace: String,
        /// Name of the Secret.
        name: String,
    },
    /// The env file is malformed or cannot be read; also for optional keys.
    #[error("couldn't parse env file")]
    EnvFile(#[source] EnvFileCause),
    /// The env file's volume is unknown or not mounted.
    #[error("cannot find the volume {0:?} referenced by FileKeyRef")]
    NoVolume(String),
    /// The env file lacks the key, or its value is empty.
    #[error("environment variable key {key:?} not found in file {path:?}")]
    NoFileKey {
        /// Variable name of the `fileKeyRef`.
        key: String,
        /// The path as in the pod spec.
        path: String,
    },
}

/// Cause of [`EnvError::EnvFile`], for logs: the message in the API does not include it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EnvFileCause {
    /// The file could not be read.
    #[error("{0}")]
    Unreadable(String),
    /// The file is malformed.
    #[error(transparent)]
    Malformed(#[from] EnvFileError),
}

/// Returns the objects that must be read before [`build`].
pub fn references(container: &api::Container) -> References {
    let mut found = References::default();
    for source in container.env_from.iter().flatten() {
        found.config_maps.extend(source.config_map_ref.as_ref().map(|r| r.name.clone()));
        found.secrets.extend(source.secret_ref.as_ref().map(|r| r.name.clone()));
    }
    for source in container.env.iter().flatten().filter(|e| !has_value(e)).filter_map(|e| e.value_from.as_ref()) {
        found.config_maps.extend(source.config_map_key_ref.as_ref().map(|r| r.name.clone()));
        found.secrets.extend(source.secret_key_ref.as_ref().map(|r| r.name.clone()));
        found.files.extend(source.file_key_ref.as_ref().map(|r| (r.volume_name.clone(), r.path.clone())));
    }
    found
}

/// Builds the environment. Names are unique, in the order of their first declaration, followed by the sorted service
/// variables.
///
/// # Errors
/// The missing or malformed input, with the reference's text.
pub fn build(container: &api::Container, inputs: &EnvInputs<'_>) -> Result<Vec<(String, String)>, EnvError> {
    let links = inputs.service_links.ok_or(EnvError::NoServiceLinks)?;
    let services = inputs.services.ok_or(EnvError::NoServices)?;
    let service_env = service_variables(services, inputs.namespace, links);
    let mut env = DeclaredVariables::default();
    for (name, value) in inputs.devices {
        env.set(name.clone(), value.clone());
    }
    for source in container.env_from.iter().flatten() {
        import(&mut env, source, inputs)?;
    }
    for variable in container.env.iter().flatten() {
        let value = match (&variable.value, &variable.value_from) {
            (Some(text), _) if !text.is_empty() => {
                let known = |name: &str| env.get(name).or_else(|| service_env.get(name).map(String::as_str));
                Some(expand(text, known)?)
            }
            (_, Some(source)) => value_from(source, inputs)?,
            _ => Some(String::new()),
        };
        if let Some(value) = value {
            env.set(variable.name.clone(), value);
        }
        if env.size > LONGEST_LIST {
            return Err(TooLong { limit: LONGEST_LIST }.into());
        }
    }
    let mut all = env.into_list();
    let declared: BTreeSet<String> = all.iter().map(|(name, _)| name.clone()).collect();
    all.extend(service_env.into_iter().filter(|(name, _)| !declared.contains(name)));
    Ok(all)
}

/// Variables in the order of their first declaration; a later value replaces an earlier one.
#[derive(Default)]
struct DeclaredVariables {
    list: Vec<(String, String)>,
    /// Total size of the values, bytes.
    size: usize,
    index: HashMap<String, usize>,
}

impl DeclaredVariables {
    fn set(&mut self, name: String, value: String) {
        self.size += value.len();
        match self.index.get(&name).and_then(|&at| self.list.get_mut(at)) {
            Some(entry) => {
                self.size -= entry.1.len();
                entry.1 = value;
            }
            None => {
                self.index.insert(name.clone(), self.list.len());
                self.list.push((name, value));
            }
        }
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.index.get(name).and_then(|&at| self.list.get(at)).map(|(_, value)| value.as_str())
    }

    fn into_list(self) -> Vec<(String, String)> {
        self.list
    }
}

fn has_value(variable: &api::EnvVar) -> bool {
    variable.value.as_deref().is_some_and(|v| !v.is_empty())
}

fn import(env: &mut DeclaredVariables, source: &api::EnvFromSource, inputs: &EnvInputs<'_>) -> Result<(), EnvError> {
    let prefix = source.prefix.as_deref().unwrap_or_default();
    if let Some(reference) = &source.config_map_ref {
        let optional = reference.optional == Some(true);
        if let Some(data) = found(inputs.config_maps.get(&reference.name), &reference.name, optional)? {
            for (key, value) in data.iter() {
                env.set(format!("{prefix}{key}"), value.clone());
            }
        }
    } else if let Some(reference) = &source.secret_ref {
        let optional = reference.optional == Some(true);
        if let Some(data) = found(inputs.secrets.get(&reference.name), &reference.name, optional)? {
            for (key, value) in data.iter() {
                env.set(format!("{prefix}{key}"), secret_text(key, value, &reference.name, inputs)?);
            }
        }
    }
    Ok(())
}

/// Returns the value of a source; `None` if an optional source is missing, so that the variable remains unset.
fn value_from(source: &api::EnvVarSource, inputs: &EnvInputs<'_>) -> Result<Option<String>, EnvError> {
    if let Some(selector) = &source.field_ref {
        return (inputs.field)(selector).map(Some).map_err(EnvError::Unreadable);
    }
    if let Some(selector) = &source.resource_field_ref {
        return (inputs.resource)(selector).map(Some).map_err(EnvError::Unreadable);
    }
    if let Some(key) = &source.config_map_key_ref {
        let optional = key.optional == Some(true);
        let Some(data) = found(inputs.config_maps.get(&key.name), &key.name, optional)? else { return Ok(None) };
        return match data.get(&key.key) {
            Some(value) => Ok(Some(value.clone())),
            None if optional => Ok(None),
            None => Err(no_key("ConfigMap", &key.key, &key.name, inputs)),
        };
    }
    if let Some(key) = &source.secret_key_ref {
        let optional = key.optional == Some(true);
        let Some(data) = found(inputs.secrets.get(&key.name), &key.name, optional)? else { return Ok(None) };
        return match data.get(&key.key) {
            Some(value) => secret_text(&key.key, value, &key.name, inputs).map(Some),
            None if optional => Ok(None),
            None => Err(no_key("Secret", &key.key, &key.name, inputs)),
        };
    }
    match &source.file_key_ref {
        Some(key) => from_file(key, inputs),
        None => Ok(Some(String::new())),
    }
}

fn from_file(key: &api::FileKeySelector, inputs: &EnvInputs<'_>) -> Result<Option<String>, EnvError> {
    let text = match inputs.files.get(&(key.volume_name.clone(), key.path.clone())) {
        Some(ReadFile::Text(text)) => text,
        Some(ReadFile::Failed(why)) => return Err(EnvError::EnvFile(EnvFileCause::Unreadable(why.clone()))),
        Some(ReadFile::NoVolume) | None => return Err(EnvError::NoVolume(key.volume_name.clone())),
    };
    let value = env_file::lookup(text, &key.key).map_err(|e| EnvError::EnvFile(e.into()))?;
    match value.filter(|v| !v.is_empty()) {
        Some(value) => Ok(Some(value)),
        None if key.optional == Some(true) => Ok(None),
        None => Err(EnvError::NoFileKey { key: key.key.clone(), path: key.path.clone() }),
    }
}

/// Returns the data of an object; `None` if it is absent and optional.
fn found<'a, T>(read: Option<&'a ObjectRead<T>>, name: &str, optional: bool) -> Result<Option<&'a T>, EnvError> {
    match read {
        Some(ObjectRead::Found(data)) => Ok(Some(&**data)),
        Some(ObjectRead::Absent(_)) if optional => Ok(None),
        Some(ObjectRead::Absent(why) | ObjectRead::Failed(why)) => Err(EnvError::Unreadable(why.clone())),
        None => Err(EnvError::Unreadable(format!("object {name:?} has not been read"))),
    }
}

fn secret_text(key: &str, value: &[u8], name: &str, inputs: &EnvInputs<'_>) -> Result<String, EnvError> {
    String::from_utf8(value.to_vec()).map_err(|_| EnvError::NotText {
        key: key.to_owned(),
        namespace: inputs.namespace.to_owned(),
        name: name.to_owned(),
    })
}

fn no_key(kind: &'static str, key: &str, name: &str, inputs: &EnvInputs<'_>) -> EnvError {
    EnvError::NoKey { key: key.to_owned(), kind, namespace: inputs.namespace.to_owned(), name: name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// ConfigMap `cm`, Secret `sec`, file `f` in volume `v`, and one service in this and in another namespace.
    fn env(container: serde_json::Value) -> Result<Vec<String>, EnvError> {
        env_of(container, Some(true))
    }

    fn env_of(mut container: serde_json::Value, links: Option<bool>) -> Result<Vec<String>, EnvError> {
        container["name"] = "c".into();
        let container: api::Container = serde_json::from_value(container).expect("a container");
        let service = |namespace: &str, name: &str| -> Arc<api::Service> {
            let object = json!({"metadata": {"name": name, "namespace": namespace}, "spec": {"clusterIP": "10.0.0.1"}});
            Arc::new(serde_json::from_value(object).expect("a service"))
        };
        let cm = BTreeMap::from([("k".to_owned(), "$(B)".to_owned()), ("l".to_owned(), "L".to_owned())]);
        let sec = BTreeMap::from([("s".to_owned(), b"hush".to_vec()), ("bin".to_owned(), vec![0xff])]);
        let inputs = EnvInputs {
            namespace: "n",
            devices: &[("DEV".to_owned(), "0".to_owned())],
            service_links: links,
            services: Some(&[service("n", "web"), service("default", "kubernetes")]),
            config_maps: &HashMap::from([
                ("cm".to_owned(), ObjectRead::Found(Arc::new(cm))),
                ("gone".to_owned(), ObjectRead::Absent("configmaps \"gone\" not found".to_owned())),
                (
                    "down".to_owned(),
                    ObjectRead::Failed("couldn't get configMap n/down, no kubeClient defined".to_owned()),
                ),
            ]),
            secrets: &HashMap::from([
                ("sec".to_owned(), ObjectRead::Found(Arc::new(sec))),
                ("gone".to_owned(), ObjectRead::Absent("secrets \"gone\" not found".to_owned())),
            ]),
            files: &HashMap::from([
                (("v".to_owned(), "f".to_owned()), ReadFile::Text("A='from file'\nE=''\nbroken".to_owned())),
                (("v".to_owned(), "none".to_owned()), ReadFile::Failed("no such file".to_owned())),
                (("u".to_owned(), "f".to_owned()), ReadFile::NoVolume),
            ]),
            field: &|selector| Ok(format!("<{}>", selector.field_path)),
            resource: &|selector| Err(format!("no {}", selector.resource)),
        };
        Ok(build(&container, &inputs)?.into_iter().map(|(k, v)| format!("{k}={v}")).collect())
    }

    /// The declared variables only, or the error text.
    fn declared(container: serde_json::Value) -> Result<Vec<String>, String> {
        let all = env_of(container, Some(false)).map_err(|e| e.to_string())?;
        Ok(all.into_iter().filter(|v| !v.contains("_SERVICE_") && v != "DEV=0").collect())
    }

    fn one(source: serde_json::Value) -> Result<Vec<String>, String> {
        declared(json!({"env": [{"name": "X", "valueFrom": source}]}))
    }

    #[test]
    fn references_see_what_was_declared_earlier() {
        // AC-02b-17
        let env = declared(json!({"env": [
            {"name": "A", "value": "$(B)"}, {"name": "B", "value": "x"}, {"name": "C", "value": "$(B)$$(B)"},
        ]}));
        assert_eq!(env, Ok(vec!["A=$(B)".to_owned(), "B=x".to_owned(), "C=x$(B)".to_owned()]));
    }

    #[test]
    fn later_declarations_win_and_keep_the_first_place() {
        let env = env(json!({
            "envFrom": [{"configMapRef": {"name": "cm"}, "prefix": "P_"}, {"secretRef": {"name": "gone", "optional": true}}],
            "env": [
                {"name": "WEB_SERVICE_HOST", "value": "mine"},
                {"name": "H", "value": "$(WEB_SERVICE_HOST) $(KUBERNETES_SERVICE_HOST) $(P_l) $(DEV)"},
                {"name": "P_l", "value": "again"},
                {"name": "N"},
                {"name": "DEV", "value": "1"},
            ],
        }));
        let expected = [
            "DEV=1",
            "P_k=$(B)",
            "P_l=again",
            "WEB_SERVICE_HOST=mine",
            "H=mine 10.0.0.1 L 0",
            "N=",
            "KUBERNETES_SERVICE_HOST=10.0.0.1",
        ];
        assert_eq!(env.expect("complete"), expected);
    }

    #[test]
    fn service_links_choose_the_services() {
        // AC-02b-19
        assert_eq!(env_of(json!({}), Some(false)).expect("complete"), ["DEV=0", "KUBERNETES_SERVICE_HOST=10.0.0.1"]);
        let error = env_of(json!({}), None).unwrap_err().to_string();
        assert_eq!(error, "nil pod.spec.enableServiceLinks encountered, cannot construct envvars");
    }

    #[test]
    fn each_source_gives_its_value_as_it_is() {
        for (source, value) in [
            (json!({"fieldRef": {"fieldPath": "metadata.name"}}), "X=<metadata.name>"),
            (json!({"configMapKeyRef": {"name": "cm", "key": "k"}}), "X=$(B)"),
            (json!({"secretKeyRef": {"name": "sec", "key": "s"}}), "X=hush"),
            (json!({"fileKeyRef": {"volumeName": "v", "path": "f", "key": "A"}}), "X=from file"),
        ] {
            assert_eq!(one(source.clone()), Ok(vec![value.to_owned()]), "{source}");
        }
    }

    #[test]
    fn optional_sources_leave_the_variable_unset() {
        // AC-02b-18
        for source in [
            json!({"configMapKeyRef": {"name": "gone", "key": "k", "optional": true}}),
            json!({"configMapKeyRef": {"name": "cm", "key": "none", "optional": true}}),
            json!({"secretKeyRef": {"name": "sec", "key": "none", "optional": true}}),
            json!({"fileKeyRef": {"volumeName": "v", "path": "f", "key": "E", "optional": true}}),
        ] {
            assert_eq!(one(source.clone()), Ok(Vec::new()), "{source}");
        }
    }

    #[test]
    fn errors_have_the_reference_texts() {
        for (source, text) in [
            (json!({"resourceFieldRef": {"resource": "limits.x"}}), "no limits.x"),
            (json!({"configMapKeyRef": {"name": "cm", "key": "z"}}), "couldn't find key z in ConfigMap n/cm"),
            (json!({"secretKeyRef": {"name": "sec", "key": "z"}}), "couldn't find key z in Secret n/sec"),
            (json!({"secretKeyRef": {"name": "gone", "key": "z"}}), "secrets \"gone\" not found"),
            (
                json!({"configMapKeyRef": {"name": "down", "key": "z", "optional": true}}),
                "couldn't get configMap n/down, no kubeClient defined",
            ),
            (
                json!({"secretKeyRef": {"name": "sec", "key": "bin"}}),
                "key bin in Secret n/sec is not valid UTF-8, cannot construct envvars",
            ),
            (
                json!({"fileKeyRef": {"volumeName": "v", "path": "f", "key": "E"}}),
                "environment variable key \"E\" not found in file \"f\"",
            ),
            (
                json!({"fileKeyRef": {"volumeName": "v", "path": "f", "key": "Z", "optional": true}}),
                "couldn't parse env file",
            ),
            (
                json!({"fileKeyRef": {"volumeName": "v", "path": "none", "key": "A", "optional": true}}),
                "couldn't parse env file",
            ),
            (
                json!({"fileKeyRef": {"volumeName": "u", "path": "f", "key": "A", "optional": true}}),
                "cannot find the volume \"u\" referenced by FileKeyRef",
            ),
        ] {
            assert_eq!(one(source.clone()), Err(text.to_owned()), "{source}");
        }
    }

    #[test]
    fn references_name_everything_to_read() {
        let container: api::Container = serde_json::from_value(json!({
            "name": "c",
            "envFrom": [{"configMapRef": {"name": "a"}}, {"secretRef": {"name": "b"}}],
            "env": [
                {"name": "1", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
                {"name": "2", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "p", "key": "k"}}},
                {"name": "3", "value": "set", "valueFrom": {"secretKeyRef": {"name": "unread", "key": "k"}}},
            ],
        }))
        .expect("a container");
        let expected = References {
            config_maps: ["a".to_owned(), "c".to_owned()].into(),
            secrets: ["b".to_owned()].into(),
            files: [("v".to_owned(), "p".to_owned())].into(),
        };
        assert_eq!(references(&container), expected);
    }
}
