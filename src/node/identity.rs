//! Node name and host name. Pure. Implements spec 01 §12.1.

/// The configured node name is invalid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IdentityError {
    /// Neither the override nor the machine has a name.
    #[error("empty hostname is invalid")]
    EmptyHostname,
}

/// Host name, which is also the node name: the override, else the machine's; trimmed and lower-case.
///
/// # Errors
/// The name is empty after trimming.
pub fn hostname(name_override: &str, machine: &str) -> Result<String, IdentityError> {
    let name = if name_override.is_empty() { machine } else { name_override };
    let name = name.trim().to_lowercase();
    if name.is_empty() { Err(IdentityError::EmptyHostname) } else { Ok(name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_the_override_or_the_machines() {
        assert_eq!(hostname("", " Node-A\n").as_deref(), Ok("node-a"));
        assert_eq!(hostname(" Edge.Example ", "node-a").as_deref(), Ok("edge.example"));
        assert_eq!(hostname("  ", "node-a").map_err(|e| e.to_string()), Err("empty hostname is invalid".to_owned()));
    }
}
