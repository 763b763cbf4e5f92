//! Environment variables of a container. Pure.
//! Implements spec 09a §6.2.

use super::refusal::LaunchError;
use berth_proto::cri;

/// Default `PATH`; the image or the request overrides it.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Inputs for a container's environment.
#[derive(Clone, Copy, Debug)]
pub struct EnvironmentInputs<'a> {
    /// Whether the container has a terminal.
    pub terminal: bool,
    /// Host name of the pod, or of the node for pods in the host network.
    pub hostname: &'a str,
    /// The image's variables as `KEY=value`.
    pub image: &'a [String],
    /// The request's variables.
    pub requested: &'a [cri::KeyValue],
    /// Variables of CDI devices as `KEY=value`.
    pub devices: &'a [String],
    /// The user's home directory, where `/etc/passwd` of the image names one.
    pub home: Option<&'a str>,
}

/// The environment in its final order; a later value replaces an earlier one of the same name.
///
/// # Errors
/// A variable contains a NUL, which no environment can carry, or is not UTF-8, which no pod spec can express.
pub fn environment(from: &EnvironmentInputs<'_>) -> Result<Vec<String>, LaunchError> {
    let mut all = Vec::new();
    set(&mut all, "PATH", DEFAULT_PATH);
    if from.terminal {
        set(&mut all, "TERM", "xterm");
    }
    set(&mut all, "HOSTNAME", from.hostname);
    for text in from.image {
        set_text(&mut all, text);
    }
    for variable in from.requested {
        let value = std::str::from_utf8(&variable.value)
            .map_err(|_| LaunchError::invalid(format!("environment variable {:?} is not UTF-8", variable.key)))?;
        set(&mut all, &variable.key, value);
    }
    for text in from.devices {
        set_text(&mut all, text);
    }
    if !all.iter().any(|text| text.strip_prefix("HOME=").is_some_and(|home| !home.is_empty())) {
        all.retain(|text| !text.starts_with("HOME="));
        set(&mut all, "HOME", from.home.filter(|home| !home.is_empty()).unwrap_or("/"));
    }
    match all.iter().find(|text| text.contains('\0')) {
        Some(text) => Err(LaunchError::invalid(format!("environment variable {:?} contains a NUL byte", key(text)))),
        None => Ok(all),
    }
}

/// Sets a variable in its existing position, or appends it.
pub fn set(all: &mut Vec<String>, name: &str, value: &str) {
    let text = format!("{name}={value}");
    match all.iter_mut().find(|earlier| key(earlier) == name) {
        Some(earlier) => *earlier = text,
        None => all.push(text),
    }
}

/// Sets `KEY=value`; text without `=` unsets the variable, as in other runtimes.
fn set_text(all: &mut Vec<String>, text: &str) {
    match text.split_once('=') {
        Some((name, value)) => set(all, name, value),
        None => all.retain(|earlier| key(earlier) != text),
    }
}

fn key(text: &str) -> &str {
    text.split_once('=').map_or(text, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &[(&str, &[u8])]) -> Vec<cri::KeyValue> {
        list.iter().map(|(key, value)| cri::KeyValue { key: (*key).to_owned(), value: value.to_vec() }).collect()
    }

    fn check(image: &[&str], requested: &[(&str, &[u8])], home: Option<&str>, expected: &[&str]) {
        let image: Vec<String> = image.iter().map(|s| (*s).to_owned()).collect();
        let requested = pairs(requested);
        let from = EnvironmentInputs {
            terminal: false,
            hostname: "h",
            image: &image,
            requested: &requested,
            devices: &[],
            home,
        };
        let path = format!("PATH={DEFAULT_PATH}");
        let expected: Vec<&str> = expected.iter().map(|s| if *s == "PATH" { path.as_str() } else { s }).collect();
        assert_eq!(environment(&from).expect("an environment"), expected);
    }

    #[test]
    fn later_values_take_the_place_of_earlier_ones() {
        check(&[], &[], None, &["PATH", "HOSTNAME=h", "HOME=/"]);
        check(&["PATH=/x", "A=1"], &[("A", b"2")], Some("/root"), &["PATH=/x", "HOSTNAME=h", "A=2", "HOME=/root"]);
        check(&["HOME=/i", "A"], &[("HOSTNAME", b"o")], Some("/r"), &["PATH", "HOSTNAME=o", "HOME=/i"]);
        check(&["HOME="], &[("B", b"x=\ny")], Some("/r"), &["PATH", "HOSTNAME=h", "B=x=\ny", "HOME=/r"]);
        check(&["HOSTNAME"], &[], Some(""), &["PATH", "HOME=/"]);
    }

    #[test]
    fn terminals_have_a_type_and_nuls_are_refused() {
        let from =
            EnvironmentInputs { terminal: true, hostname: "h", image: &[], requested: &[], devices: &[], home: None };
        assert_eq!(environment(&from).expect("an environment").get(1).map(String::as_str), Some("TERM=xterm"));
        for (value, text) in [
            (&b"a\0b"[..], "environment variable \"A\" contains a NUL byte"),
            (b"\xff", "environment variable \"A\" is not UTF-8"),
        ] {
            let requested = pairs(&[("A", value)]);
            let refusal = environment(&EnvironmentInputs { requested: &requested, ..from }).expect_err("a refusal");
            assert_eq!(refusal, LaunchError::invalid(text));
        }
    }
}
