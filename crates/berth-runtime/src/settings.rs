//! Where the runtime's settings are: section `embeddedRuntime` of our own configuration file. Blocking: reads a small file.
//!
//! Behaviour: spec 09 §5.

use std::path::PathBuf;

use super::config::EmbeddedConfig;

/// Names another file with the runtime's settings.
const FILE_VARIABLE: &str = "BERTH_CONFIG";
/// Where they are else; a file that is missing says nothing.
const FILE: &str = "/etc/berth/config.yaml";
/// The section.
const SECTION: &str = "embeddedRuntime";

/// Sections of others.
const OTHERS: [&str; 4] = ["node", "offlinePods", "shutdown", "standaloneObjects"];

/// The runtime's settings.
///
/// # Errors
/// Names the file and the field.
pub fn read() -> Result<EmbeddedConfig, String> {
    let path = path();
    let told = |cause: String| format!("{}: {cause}", path.display());
    let mut config = EmbeddedConfig::default();
    for (name, section) in sections()? {
        match name.as_str() {
            SECTION => config = EmbeddedConfig::read(section).map_err(told)?,
            other if OTHERS.contains(&other) => {}
            other => return Err(told(format!("unknown field `{other}`, expected `{SECTION}`"))),
        }
    }
    Ok(config)
}

/// One section of the file, if it is there.
///
/// # Errors
/// Names the file.
pub fn section(name: &str) -> Result<Option<serde_json::Value>, String> {
    Ok(sections()?.remove(name))
}

/// Where the settings are.
pub fn path() -> PathBuf {
    std::env::var_os(FILE_VARIABLE).map_or_else(|| PathBuf::from(FILE), PathBuf::from)
}

fn sections() -> Result<serde_json::Map<String, serde_json::Value>, String> {
    let path = path();
    match std::fs::read_to_string(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(serde_json::Map::new()),
        Err(e) => Err(format!("read {}: {e}", path.display())),
        Ok(text) => serde_saphyr::from_str(&text).map_err(|e| format!("{}: {e}", path.display())),
    }
}
