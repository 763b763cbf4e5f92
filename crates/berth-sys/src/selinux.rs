//! SELinux: file context of containers from the policy, and file labels.
//!
//! On a machine without SELinux there is no context.

use std::{fs, io, path::Path};

use rustix::fs::{XattrFlags, setxattr};

use super::machine;

const ROOT: &str = "/etc/selinux";
/// Maximum size of a configuration file, bytes; a larger one is ignored.
const LONGEST: usize = 64 << 10;

/// Context of container files (`user:role:type:level`); `None` if SELinux is disabled or its policy has no container
/// contexts.
pub fn file_context() -> Option<String> {
    if !machine::selinux_enabled() {
        return None;
    }
    let read = |path: &Path| fs::read_to_string(path).ok().filter(|text| text.len() <= LONGEST);
    let config = read(&Path::new(ROOT).join("config")).unwrap_or_default();
    let contexts = Path::new(ROOT).join(policy(&config)?).join("contexts/lxc_contexts");
    of_files(&read(&contexts)?)
}

/// Policy name in `/etc/selinux/config`; default `targeted`.
fn policy(config: &str) -> Option<&str> {
    let named = config.lines().find_map(|line| line.trim().strip_prefix("SELINUXTYPE="));
    let name = named.map_or("targeted", |name| name.trim().trim_matches('"'));
    (!name.is_empty() && !name.contains('/') && !name.starts_with('.')).then_some(name)
}

/// File context in `lxc_contexts`; `None` if the file has no process context.
fn of_files(contexts: &str) -> Option<String> {
    let value = |key: &str| {
        contexts.lines().find_map(|line| {
            let (name, value) = line.split_once('=')?;
            let value = value.trim().trim_matches('"');
            (name.trim() == key && !value.is_empty()).then(|| value.to_owned())
        })
    };
    value("process").and(value("file"))
}

/// Sets the label of a file.
///
/// # Errors
/// The kernel's error.
pub fn set_label(path: &Path, label: &str) -> io::Result<()> {
    let value: Vec<u8> = label.bytes().chain([0]).collect();
    Ok(setxattr(path, "security.selinux", &value, XattrFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_names_the_policy() {
        for (config, expected) in [
            ("# SELINUXTYPE=x\nSELINUX=enforcing\nSELINUXTYPE=minimum \n", Some("minimum")),
            ("SELINUX=enforcing\n", Some("targeted")),
            ("", Some("targeted")),
            ("SELINUXTYPE=../../tmp\n", None),
            ("SELINUXTYPE=\n", None),
        ] {
            assert_eq!(policy(config), expected, "{config}");
        }
    }

    #[test]
    fn the_container_file_context_is_read_from_the_policy() {
        let good = "; comment\nprocess = \"system_u:system_r:container_t:s0\"\ncontent = \"x\"\n\
                    file = \"system_u:object_r:container_file_t:s0\"\nro_file = \"y\"\n";
        assert_eq!(of_files(good).as_deref(), Some("system_u:object_r:container_file_t:s0"));
        for bad in ["", "file = \"a:b:c:d\"\n", "process = \"a:b:c:d\"\n", "process=\"\"\nfile=\"a:b:c:d\"\n", "=\n"] {
            assert_eq!(of_files(bad), None, "{bad}");
        }
    }
}
