//! CSI version negotiation with a driver. Pure. Implements spec 07 §12.1.

use std::fmt;

/// Version such as `1.9.0`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct CsiVersion(Vec<u64>);

impl fmt::Display for CsiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.0.iter().map(u64::to_string).collect();
        f.write_str(&parts.join("."))
    }
}

impl CsiVersion {
    /// Parses `v1.2.3`; ignores any suffix after the numbers.
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let text = text.strip_prefix('v').unwrap_or(text);
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let numbers = text.get(..end)?.trim_end_matches('.');
        let mut parts = numbers.split('.').map(|part| part.parse().ok()).collect::<Option<Vec<u64>>>()?;
        if parts.len() < 2 {
            return None;
        }
        // 1.0 and 1.0.0 are equal.
        parts.resize(parts.len().max(3), 0);
        Some(Self(parts))
    }

    fn major(&self) -> u64 {
        self.0.first().copied().unwrap_or_default()
    }
}

/// Returns the highest supported version (v1.x).
///
/// # Errors
/// If there is none, with the message of the upstream kubelet.
pub fn highest(versions: &[String]) -> Result<CsiVersion, String> {
    let known = versions.iter().filter_map(|text| CsiVersion::parse(text)).filter(|version| version.major() <= 1).max();
    match known {
        Some(version) if version.major() == 1 => Ok(version),
        Some(version) => Err(format!("highest supported version reported by driver is {version}, must be v1.x")),
        None => {
            let all = versions.join(" ");
            Err(format!("could not find a highest supported version from versions ([{all}]) reported by this driver"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_version_of_ours_is_taken() {
        let of = |versions: &[&str]| {
            let versions: Vec<String> = versions.iter().map(|text| (*text).to_owned()).collect();
            highest(&versions).map(|version| version.to_string())
        };
        assert_eq!(of(&["0.3.0", "v1.0.0", "1.2", "1.1.9"]), Ok("1.2.0".to_owned()));
        assert_eq!(of(&["1.10.0", "1.9.0", "2.0.0", "x"]), Ok("1.10.0".to_owned()));
        assert_eq!(of(&["1.2.0-rc1"]), Ok("1.2.0".to_owned()));
        let none = "could not find a highest supported version from versions ([2.0.0 x 1]) reported by this driver";
        assert_eq!(of(&["2.0.0", "x", "1"]), Err(none.to_owned()));
        let old = "highest supported version reported by driver is 0.3.0, must be v1.x";
        assert_eq!(of(&["0.3.0", "2.0.0"]), Err(old.to_owned()));
        assert!(of(&["99999999999999999999.1", "1..2", "v", ".", ""]).is_err());
    }
}
