//! Seccomp profile: OCI `LinuxSeccomp` JSON with the conditions of other runtimes. Pure.

use serde::{Deserialize, Deserializer};

use super::machine::CpuArchitecture;

/// A malformed or unsupported profile.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ProfileError(pub String);

/// Default action and rules, as Docker and containerd write them.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SeccompProfile {
    /// Action for calls that no rule matches.
    pub default_action: String,
    /// Error number of the default action, if it is `SCMP_ACT_ERRNO`.
    #[serde(default)]
    pub default_errno_ret: Option<u32>,
    /// Permitted architectures; empty: see `arch_map`.
    #[serde(default, deserialize_with = "or_empty")]
    pub architectures: Vec<String>,
    /// Sub-architectures per architecture.
    #[serde(default, deserialize_with = "or_empty")]
    pub arch_map: Vec<Architecture>,
    /// Flags of `seccomp(2)`; `None`: `SECCOMP_FILTER_FLAG_SPEC_ALLOW` where supported.
    #[serde(default)]
    pub flags: Option<Vec<String>>,
    /// Rules; of those for one call, the first match applies.
    #[serde(default, deserialize_with = "or_empty")]
    pub syscalls: Vec<Rule>,
}

/// An architecture and its sub-architectures.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Architecture {
    /// Name such as `SCMP_ARCH_X86_64`.
    pub architecture: String,
    /// Architectures that are permitted in addition.
    #[serde(default, deserialize_with = "or_empty")]
    pub sub_architectures: Vec<String>,
}

/// Action for a set of system calls.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Rule {
    /// System call names; unknown ones are ignored.
    #[serde(deserialize_with = "or_empty")]
    pub names: Vec<String>,
    /// A single system call name, in addition to `names`.
    pub name: String,
    /// Action, `SCMP_ACT_ALLOW` and others.
    pub action: String,
    /// Error number for `SCMP_ACT_ERRNO`, or value for `SCMP_ACT_TRACE`.
    pub errno_ret: Option<u32>,
    /// Argument conditions, all of which must hold.
    #[serde(deserialize_with = "or_empty")]
    pub args: Vec<Argument>,
    /// The rule applies only if all of this holds.
    #[serde(deserialize_with = "or_empty_condition")]
    pub includes: RuleCondition,
    /// The rule does not apply if any of this holds.
    #[serde(deserialize_with = "or_empty_condition")]
    pub excludes: RuleCondition,
}

/// A condition on an argument.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Argument {
    /// Argument index, 0 to 5.
    pub index: usize,
    /// Value to compare with; for `SCMP_CMP_MASKED_EQ` the mask.
    pub value: u64,
    /// Expected value after masking.
    #[serde(default)]
    pub value_two: u64,
    /// Operator, `SCMP_CMP_EQ` and others.
    pub op: String,
}

/// Condition on host and container.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RuleCondition {
    /// Capabilities such as `CAP_SYS_ADMIN`.
    #[serde(deserialize_with = "or_empty")]
    pub caps: Vec<String>,
    /// Architectures such as `amd64`.
    #[serde(deserialize_with = "or_empty")]
    pub arches: Vec<String>,
    /// Minimum kernel version such as `4.8`.
    pub min_kernel: Option<String>,
}

/// Deserializes `null` as an empty list, as Go programs write it.
fn or_empty<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

fn or_empty_condition<'de, D: Deserializer<'de>>(from: D) -> Result<RuleCondition, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl SeccompProfile {
    /// Permits only the machine's native ABI: neither 32-bit calls nor x32.
    pub fn restrict_to(&mut self, machine: CpuArchitecture) {
        self.architectures = machine.sections().iter().take(1).map(|own| own.name().to_owned()).collect();
    }

    /// Parses a profile.
    ///
    /// # Errors
    /// The text is not JSON of this form.
    pub fn parse(text: &[u8]) -> Result<Self, ProfileError> {
        serde_json::from_slice(text).map_err(|error| ProfileError(error.to_string()))
    }
}

/// The kernel's value of an action.
///
/// # Errors
/// The action is unknown or unsupported, or the error number is out of range.
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
