//! CNI network configuration files and plugin input. Pure.
//!
//! Implements spec 09b §13.1.

use serde_json::{Map, Value};

/// Supported CNI versions.
const VERSIONS: [&str; 7] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0", "0.3", "1.0"];
/// File extensions of CNI configurations.
const ENDINGS: [&str; 3] = [".conf", ".conflist", ".json"];

/// A network: plugins that run in order.
#[derive(Clone, PartialEq, Debug)]
pub struct CniNetwork {
    /// Network name.
    pub name: String,
    /// CNI version.
    pub version: String,
    /// Plugin configurations.
    pub plugins: Vec<Map<String, Value>>,
    /// The configuration text as a conflist.
    pub text: String,
}

/// The effective configuration file: the first one by name.
pub fn first(mut names: Vec<String>) -> Option<String> {
    names.retain(|name| ENDINGS.iter().any(|ending| name.ends_with(ending)));
    names.sort();
    names.into_iter().next()
}

/// Parses a configuration file; the file name determines the format.
///
/// # Errors
/// The reason why the file is unusable.
pub fn parse(file: &str, text: &str) -> Result<CniNetwork, String> {
    let object: Map<String, Value> =
        serde_json::from_str(text).map_err(|e| format!("failed to load CNI config {file}: {e}"))?;
    let of = |key: &str| object.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let name = of("name");
    let version = if of("cniVersion").is_empty() { "0.1.0".to_owned() } else { of("cniVersion") };
    let is_list = file.ends_with(".conflist");
    let plugins = if is_list { listed(file, &object)? } else { vec![object.clone()] };
    if plugins.iter().any(|plugin| kind(plugin).is_empty()) {
        return Err(format!("failed to load CNI config {file}: network type not found in {file}"));
    }
    if !is_name(&name) {
        return Err(format!("failed to load CNI config {file}: invalid network name {name:?}"));
    }
    if !VERSIONS.contains(&version.as_str()) {
        return Err(format!("failed to load CNI config {file}: unsupported CNI version {version:?}"));
    }
    let text = if is_list { text.to_owned() } else { wrapped(&name, &version, object).to_string() };
    Ok(CniNetwork { name, version, plugins, text })
}

fn listed(file: &str, object: &Map<String, Value>) -> Result<Vec<Map<String, Value>>, String> {
    let empty = || format!("failed to load CNI config {file}: CNI config list {file} has no networks");
    let list = object.get("plugins").and_then(Value::as_array).filter(|list| !list.is_empty()).ok_or_else(empty)?;
    let plugin = |value: &Value| value.as_object().cloned();
    list.iter()
        .map(plugin)
        .collect::<Option<_>>()
        .ok_or_else(|| format!("failed to load CNI config {file}: a plugin is not a JSON object"))
}

fn wrapped(name: &str, version: &str, plugin: Map<String, Value>) -> Value {
    serde_json::json!({"name": name, "cniVersion": version, "plugins": [plugin]})
}

/// A plugin's type, which is also the name of its binary.
pub fn kind(plugin: &Map<String, Value>) -> &str {
    plugin.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// Whether a type is a valid file name, without path separators.
pub fn is_program(kind: &str) -> bool {
    !kind.is_empty() && !kind.contains('/') && !kind.contains('\0') && kind != "." && kind != ".."
}

/// Whether a network name is valid; names become parts of file names.
fn is_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
        && name.len() <= 128
}

/// Whether this version supports STATUS and GC.
pub fn has_status(version: &str) -> bool {
    version == "1.1.0"
}

/// Whether DEL receives `prevResult` in this version.
pub fn passes_result_on_del(version: &str) -> bool {
    !version.starts_with("0.3")
}

/// The JSON input of a plugin call: the plugin's configuration plus the data of the call. Includes only the runtime
/// configuration that the plugin declares as a capability.
pub fn input(
    network: &CniNetwork,
    plugin: &Map<String, Value>,
    known: &Map<String, Value>,
    previous: Option<&Value>,
) -> Value {
    let mut config = plugin.clone();
    config.insert("name".to_owned(), network.name.clone().into());
    config.insert("cniVersion".to_owned(), network.version.clone().into());
    let uses = |key: &str| plugin.get("capabilities").and_then(|c| c.get(key)).and_then(Value::as_bool) == Some(true);
    let used: Map<String, Value> =
        known.iter().filter(|(key, _)| uses(key)).map(|(key, value)| (key.clone(), value.clone())).collect();
    if !used.is_empty() {
        config.insert("runtimeConfig".to_owned(), used.into());
    }
    if let Some(previous) = previous {
        config.insert("prevResult".to_owned(), previous.clone());
    }
    config.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_first_file_counts() {
        let names = |list: &[&str]| list.iter().map(|n| (*n).to_owned()).collect();
        assert_eq!(first(names(&["20-b.conf", "10-a.conflist", "00-x.txt"])).as_deref(), Some("10-a.conflist"));
        assert_eq!(first(names(&["README"])), None);
    }

    #[test]
    fn a_single_plugin_becomes_a_list() {
        let network = parse("a.conf", r#"{"name":"n","cniVersion":"0.4.0","type":"bridge","x":1}"#).expect("fine");
        assert_eq!(
            (network.name.as_str(), network.version.as_str(), kind(&network.plugins[0])),
            ("n", "0.4.0", "bridge")
        );
        assert_eq!(parse("a.conflist", &network.text).expect("fine").plugins, network.plugins);
    }

    #[test]
    fn errors_of_invalid_configs_name_file_and_cause() {
        for (file, text, expected) in [
            ("a.conf", "{}", "failed to load CNI config a.conf: network type not found in a.conf"),
            (
                "a.conflist",
                r#"{"name":"n","cniVersion":"1.0.0","plugins":[]}"#,
                "failed to load CNI config a.conflist: CNI config list a.conflist has no networks",
            ),
            (
                "a.conf",
                r#"{"name":"../n","cniVersion":"1.0.0","type":"x"}"#,
                "failed to load CNI config a.conf: invalid network name \"../n\"",
            ),
            (
                "a.conf",
                r#"{"name":"n","type":"x"}"#,
                "failed to load CNI config a.conf: unsupported CNI version \"0.1.0\"",
            ),
        ] {
            assert_eq!(parse(file, text).expect_err("wrong"), expected);
        }
        assert!(parse("a.conf", "{").expect_err("no JSON").starts_with("failed to load CNI config a.conf: "));
    }

    #[test]
    fn a_plugin_gets_the_runtime_config_of_its_capabilities() {
        let text = r#"{"name":"n","cniVersion":"1.0.0","type":"x","capabilities":{"portMappings":true,"dns":false}}"#;
        let network = parse("a.conf", text).expect("fine");
        let known = json!({"portMappings": [1], "dns": {}, "bandwidth": {}});
        let config =
            input(&network, &network.plugins[0], known.as_object().expect("an object"), Some(&json!({"ips": []})));
        assert_eq!(config["runtimeConfig"], json!({"portMappings": [1]}));
        assert_eq!(
            (&config["name"], &config["cniVersion"], &config["prevResult"]),
            (&json!("n"), &json!("1.0.0"), &json!({"ips": []}))
        );
        for kind in ["", "a/b", "..", "x\0"] {
            assert!(!is_program(kind), "{kind:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_file_is_read(text in ".{0,200}", name in "[a-z./]{0,9}", keys in "[a-zA-Z\"{}:,\\[\\]]{0,60}") {
            for file in ["a.conf", "a.conflist"] {
                for text in [&text, &keys, &format!("{{\"name\":\"{name}\",\"cniVersion\":\"1.0.0\",\"plugins\":[{keys}],\"type\":\"{name}\"}}")] {
                    if let Ok(network) = parse(file, text) {
                        proptest::prop_assert!(!network.name.contains('/') && !network.plugins.is_empty());
                    }
                }
            }
            let _ = super::super::result::failure(keys.as_bytes(), text.as_bytes());
        }
    }
}
