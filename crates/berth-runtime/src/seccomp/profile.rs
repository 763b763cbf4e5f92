//! A profile as people write it: OCI's `LinuxSeccomp` with the conditions other runtimes know. Pure.

use serde::{Deserialize, Deserializer};

use super::machine::Machine;

/// Refused: what of a profile cannot be understood.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ProfileError(pub String);

/// A profile.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Profile {
    /// What happens to calls no rule is about.
    pub default_action: String,
    /// The error of that, where it is one.
    #[serde(default)]
    pub default_errno_ret: Option<u32>,
    /// Architectures that may call at all; empty: see `arch_map`.
    #[serde(default, deserialize_with = "or_empty")]
    pub architectures: Vec<String>,
    /// For each architecture those that may call beside it.
    #[serde(default, deserialize_with = "or_empty")]
    pub arch_map: Vec<Architecture>,
    /// Flags of `seccomp(2)`; none: the usual one.
    #[serde(default)]
    pub flags: Option<Vec<String>>,
    /// Rules; of those about one call the first that fits counts.
    #[serde(default, deserialize_with = "or_empty")]
    pub syscalls: Vec<Rule>,
}

/// An architecture and those that may call beside it.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Architecture {
    /// `SCMP_ARCH_X86_64`
    pub architecture: String,
    /// Those beside.
    #[serde(default, deserialize_with = "or_empty")]
    pub sub_architectures: Vec<String>,
}

/// What happens to some calls.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Rule {
    /// Which; what we do not know is left out.
    #[serde(deserialize_with = "or_empty")]
    pub names: Vec<String>,
    /// Which, as one.
    pub name: String,
    /// `SCMP_ACT_ALLOW` and others.
    pub action: String,
    /// The error, where that is the action.
    pub errno_ret: Option<u32>,
    /// What has to hold of the arguments, all of it.
    #[serde(deserialize_with = "or_empty")]
    pub args: Vec<Argument>,
    /// The rule is there only where all of this holds.
    #[serde(deserialize_with = "or_empty_condition")]
    pub includes: Condition,
    /// The rule is not there where any of this holds.
    #[serde(deserialize_with = "or_empty_condition")]
    pub excludes: Condition,
}

/// What has to hold of an argument.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Argument {
    /// 0 to 5.
    pub index: usize,
    /// Compared with; for `SCMP_CMP_MASKED_EQ` the mask.
    pub value: u64,
    /// What is left after the mask.
    #[serde(default)]
    pub value_two: u64,
    /// `SCMP_CMP_EQ` and others.
    pub op: String,
}

/// Where a rule is there.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    /// Capabilities, `CAP_SYS_ADMIN`.
    #[serde(deserialize_with = "or_empty")]
    pub caps: Vec<String>,
    /// Processors, `amd64`.
    #[serde(deserialize_with = "or_empty")]
    pub arches: Vec<String>,
    /// `4.8`: that kernel and later ones.
    pub min_kernel: Option<String>,
}

/// Profiles written by Go programs have `null` for an empty list.
fn or_empty<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

fn or_empty_condition<'de, D: Deserializer<'de>>(from: D) -> Result<Condition, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl Profile {
    /// Lets only the machine's own kind of system calls through: neither 32-bit ones nor those of x32.
    pub fn restrict_to(&mut self, machine: Machine) {
        self.architectures = machine.sections().iter().take(1).map(|own| own.name().to_owned()).collect();
    }

    /// Reads a profile.
    ///
    /// # Errors
    /// Where it is not JSON of that form.
    pub fn parse(text: &[u8]) -> Result<Self, ProfileError> {
        serde_json::from_slice(text).map_err(|error| ProfileError(error.to_string()))
    }
}

/// An action as the kernel numbers it.
///
/// # Errors
/// Where it is unknown, or one we do not carry out.
pub fn action(name: &str, errno: Option<u32>) -> Result<u32, ProfileError> {
    const NOT_PERMITTED: u32 = 1;
    const LARGEST_ERRNO: u32 = 4095;
    let errno = errno.unwrap_or(NOT_PERMITTED);
    match name {
        "SCMP_ACT_ALLOW" => Ok(0x7fff_0000),
        "SCMP_ACT_LOG" => Ok(0x7ffc_0000),
        "SCMP_ACT_ERRNO" if errno > LARGEST_ERRNO => Err(ProfileError(format!("error number {errno} is out of range"))),
        "SCMP_ACT_ERRNO" => Ok(0x0005_0000 | errno),
        "SCMP_ACT_TRACE" => Ok(0x7ff0_0000 | (errno & 0xffff)),
        "SCMP_ACT_TRAP" => Ok(0x0003_0000),
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => Ok(0),
        "SCMP_ACT_KILL_PROCESS" => Ok(0x8000_0000),
        "SCMP_ACT_NOTIFY" => Err(ProfileError("action SCMP_ACT_NOTIFY is not supported".to_owned())),
        other => Err(ProfileError(format!("unknown action {other:?}"))),
    }
}
