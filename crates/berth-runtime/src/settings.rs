//! Loads the runtime's settings from section `embeddedRuntime` of the configuration file. Blocking.
//!
//! Implements spec 09 §5.

use std::path::PathBuf;

use super::config::EmbeddedConfig;

/// Environment variable with the path of the configuration file.
const FILE_VARIABLE: &str = "BERTH_CONFIG";
/// Default path; a missing file means default settings.
const FILE: &str = "/etc/berth/config.yaml";
/// Section of the runtime.
const SECTION: &str = "embeddedRuntime";

/// Sections of other components, ignored here.
const OTHERS: [&str; 6] = ["devices", "node", "offlinePods", "resourceManagers", "shutdown", "standaloneObjects"];

/// Reads the runtime's settings.
///
/// # Errors
/// The file and the invalid field.
pub fn read() -> Result<EmbeddedConfig, String> {
    let path = path();
    let with_path = |cause: String| format!("{}: {cause}", path.display());
    let mut config = EmbeddedConfig::default();
    for (name, section) in sections()? {
        match name.as_str() {
            SECTION => config = EmbeddedConfig::read(section).map_err(with_path)?,
            other if OTHERS.contains(&other) => {}
            other => return Err(with_path(format!("unknown field `{other}`, expected `{SECTION}`"))),
        }
    }
    Ok(config)
}

/// Reads one section of the file; `None` if it is absent.
///
/// # Errors
/// The file is unreadable or malformed; the text names it.
pub fn section(name: &str) -> Result<Option<serde_json::Value>, String> {
    Ok(sections()?.remove(name))
}

/// Path of the configuration file.
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
