//! Privileged mode, seccomp, AppArmor, SELinux checks, and `oom_score_adj` of containers. Pure.
//! Implements spec 09a §7.2, §7.6-§7.8.

use super::{
    inputs::{Host, LaunchInputs},
    refusal::LaunchError,
};
use berth_proto::cri::{self, security_profile::ProfileType};

/// Default AppArmor profiles in order of preference: Berth's, then containerd's. The first loaded one applies.
const DEFAULT_APPARMOR: [&str; 2] = ["berth-default", "cri-containerd.apparmor.d"];

/// Source of a container's seccomp filter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Filter {
    /// No filter.
    None,
    /// The built-in default profile.
    BuiltIn,
    /// The profile file at this absolute path.
    File(String),
}

/// A requested profile, from either the current or the deprecated field.
#[derive(Clone, PartialEq, Eq, Debug)]
enum ProfileSelection {
    Default,
    Unconfined,
    Localhost(String),
}

/// The security context of a container; empty if the request has none.
pub fn context(config: &cri::ContainerConfig) -> cri::LinuxContainerSecurityContext {
    config.linux.as_ref().and_then(|linux| linux.security_context.clone()).unwrap_or_default()
}

/// Whether a container is privileged.
///
/// # Errors
/// The container is privileged and its sandbox is not.
pub fn is_privileged(
    inputs: &LaunchInputs<'_>,
    context: &cri::LinuxContainerSecurityContext,
) -> Result<bool, LaunchError> {
    let of_sandbox = inputs.sandbox.config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    if context.privileged && !of_sandbox.is_some_and(|sandbox| sandbox.privileged) {
        return Err(LaunchError::plain("no privileged container allowed in sandbox"));
    }
    Ok(context.privileged)
}

/// The seccomp filter of a container.
///
/// # Errors
/// The profile field is inconsistent or malformed, or the kernel does not support seccomp.
pub fn filter(context: &cri::LinuxContainerSecurityContext, has_seccomp: bool) -> Result<Filter, LaunchError> {
    if context.privileged {
        return Ok(Filter::None);
    }
    #[allow(deprecated, reason = "older clients use it")]
    let old = &context.seccomp_profile_path;
    let asked = match &context.seccomp {
        Some(profile) => Some(of_field("seccomp", profile)?),
        None => of_text("seccomp", old)?,
    };
    match asked {
        None | Some(ProfileSelection::Unconfined) => Ok(Filter::None),
        Some(_) if !has_seccomp => Err(LaunchError::plain("seccomp is not supported")),
        Some(ProfileSelection::Default) => Ok(Filter::BuiltIn),
        Some(ProfileSelection::Localhost(path)) if path.starts_with('/') => Ok(Filter::File(path)),
        Some(ProfileSelection::Localhost(path)) => {
            Err(LaunchError::plain(format!("seccomp profile {path:?} is not an absolute path")))
        }
    }
}

/// The AppArmor profile of a container's processes; `None`: unconfined.
///
/// # Errors
/// The host has no AppArmor, or the named profile is not loaded.
pub fn apparmor(
    context: &cri::LinuxContainerSecurityContext,
    loaded: Option<&[String]>,
) -> Result<Option<String>, LaunchError> {
    #[allow(deprecated, reason = "older clients use it")]
    let old = &context.apparmor_profile;
    let asked = match &context.apparmor {
        Some(profile) => Some(of_field("apparmor", profile)?),
        None => of_text("apparmor", old)?,
    };
    let Some(loaded) = loaded else {
        return match asked {
            None | Some(ProfileSelection::Unconfined) => Ok(None),
            Some(_) => Err(LaunchError::plain("apparmor is not supported")),
        };
    };
    match asked {
        Some(ProfileSelection::Unconfined) => Ok(None),
        Some(ProfileSelection::Localhost(name)) if loaded.contains(&name) => Ok(Some(name)),
        Some(ProfileSelection::Localhost(name)) => {
            Err(LaunchError::plain(format!("apparmor profile not found {name}")))
        }
        None | Some(ProfileSelection::Default) if context.privileged => Ok(None),
        None | Some(ProfileSelection::Default) => Ok(default_apparmor(loaded).map(str::to_owned)),
    }
}

/// The default profile for containers that name none; `None` if no default profile is loaded: they run unconfined.
pub fn default_apparmor(loaded: &[String]) -> Option<&'static str> {
    DEFAULT_APPARMOR.into_iter().find(|name| loaded.iter().any(|l| l == name))
}

/// Profile names from the kernel's list, whose lines are `name (enforce)`.
pub fn apparmor_profiles(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.rsplit_once(" (")).map(|(name, _)| name.to_owned()).collect()
}

fn of_field(which: &str, profile: &cri::SecurityProfile) -> Result<ProfileSelection, LaunchError> {
    let kind = ProfileType::try_from(profile.profile_type)
        .map_err(|_| LaunchError::invalid(format!("{which} unknown ProfileType {}", profile.profile_type)))?;
    if kind != ProfileType::Localhost && !profile.localhost_ref.is_empty() {
        let text = format!("{which} config invalid LocalhostRef must only be set if ProfileType is Localhost");
        return Err(LaunchError::invalid(text));
    }
    Ok(match kind {
        ProfileType::RuntimeDefault => ProfileSelection::Default,
        ProfileType::Unconfined => ProfileSelection::Unconfined,
        ProfileType::Localhost => ProfileSelection::Localhost(without_prefix(&profile.localhost_ref)),
    })
}

/// Parses the deprecated string field; empty means no request.
fn of_text(which: &str, text: &str) -> Result<Option<ProfileSelection>, LaunchError> {
    match text {
        "" => Ok(None),
        "runtime/default" | "docker/default" => Ok(Some(ProfileSelection::Default)),
        "unconfined" => Ok(Some(ProfileSelection::Unconfined)),
        text if text.starts_with("localhost/") => Ok(Some(ProfileSelection::Localhost(without_prefix(text)))),
        text => Err(LaunchError::plain(format!("invalid {which} profile {text:?}"))),
    }
}

fn without_prefix(reference: &str) -> String {
    reference.strip_prefix("localhost/").unwrap_or(reference).to_owned()
}

/// Validates SELinux options, which are otherwise ignored: the runtime sets no labels.
///
/// # Errors
/// The level is malformed, or any option is set on a host with SELinux.
pub fn check_selinux(options: Option<&cri::SeLinuxOption>, host: &Host) -> Result<(), LaunchError> {
    let Some(options) = options else { return Ok(()) };
    let is_asked =
        [&options.user, &options.role, &options.r#type, &options.level].iter().any(|field| !field.is_empty());
    if !options.level.is_empty() && !is_level(&options.level) {
        return Err(LaunchError::plain(format!("the format of 'level' {:?} is not correct", options.level)));
    }
    if is_asked && host.has_selinux {
        return Err(LaunchError::invalid("selinux is not supported by the embedded runtime"));
    }
    Ok(())
}

/// Whether a level matches `s0-s1:c1.c3,c5`: sensitivities of one digit, categories of at most four.
fn is_level(text: &str) -> bool {
    let (sensitivities, categories) = match text.split_once(':') {
        Some((left, right)) => (left, Some(right)),
        None => (text, None),
    };
    let is_number = |text: &str, mark: char, longest: usize| {
        text.strip_prefix(mark)
            .is_some_and(|n| (1..=longest).contains(&n.len()) && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let is_pair = |text: &str, between: char, mark: char, longest: usize| match text.split_once(between) {
        Some((low, high)) => is_number(low, mark, longest) && is_number(high, mark, longest),
        None => is_number(text, mark, longest),
    };
    is_pair(sensitivities, '-', 's', 1)
        && categories.is_none_or(|all| all.split(',').all(|part| is_pair(part, '.', 'c', 4)))
}

/// `oom_score_adj` of a container: the requested value, clamped and not below the minimum that the agent can set.
pub fn oom_score_adj(resources: Option<&cri::LinuxContainerResources>, least: Option<i32>) -> Option<i32> {
    let wanted = resources?.oom_score_adj.clamp(-1000, 1000);
    let wanted = i32::try_from(wanted).unwrap_or_default();
    Some(least.map_or(wanted, |least| wanted.max(least)))
}

#[cfg(test)]
#[allow(deprecated, reason = "older clients use the old fields")]
mod tests {
    use super::*;

    fn profile(kind: ProfileType, reference: &str) -> Option<cri::SecurityProfile> {
        Some(cri::SecurityProfile { profile_type: kind.into(), localhost_ref: reference.to_owned() })
    }

    fn filtered(new: Option<cri::SecurityProfile>, old: &str, privileged: bool, expected: Result<Filter, &str>) {
        let context = cri::LinuxContainerSecurityContext {
            seccomp: new.clone(),
            seccomp_profile_path: old.to_owned(),
            privileged,
            ..Default::default()
        };
        let got = filter(&context, true).map_err(|refusal| refusal.text);
        assert_eq!(got, expected.map_err(str::to_owned), "{new:?} {old}");
    }

    #[test]
    fn filters_are_chosen_by_either_field() {
        use ProfileType::{Localhost, RuntimeDefault, Unconfined};
        filtered(None, "", false, Ok(Filter::None));
        filtered(None, "runtime/default", false, Ok(Filter::BuiltIn));
        filtered(None, "docker/default", false, Ok(Filter::BuiltIn));
        filtered(None, "unconfined", false, Ok(Filter::None));
        filtered(None, "localhost//a/b.json", false, Ok(Filter::File("/a/b.json".into())));
        filtered(None, "other", false, Err("invalid seccomp profile \"other\""));
        // AC-09a-X9, AC-09a-X17: the built-in profile, also for exec processes.
        filtered(profile(RuntimeDefault, ""), "unconfined", false, Ok(Filter::BuiltIn));
        filtered(profile(RuntimeDefault, ""), "", true, Ok(Filter::None));
        filtered(profile(Unconfined, ""), "runtime/default", false, Ok(Filter::None));
        filtered(profile(Localhost, "localhost//a"), "", false, Ok(Filter::File("/a".into())));
        filtered(profile(Localhost, "a"), "", false, Err("seccomp profile \"a\" is not an absolute path"));
        filtered(
            profile(Unconfined, "/a"),
            "",
            false,
            Err("seccomp config invalid LocalhostRef must only be set if ProfileType is Localhost"),
        );
        let old = Some(cri::SecurityProfile { profile_type: 7, localhost_ref: String::new() });
        filtered(old, "", false, Err("seccomp unknown ProfileType 7"));
    }

    #[test]
    fn kernels_without_filters_refuse_them() {
        for (kind, expected) in [(ProfileType::Unconfined, true), (ProfileType::RuntimeDefault, false)] {
            let context = cri::LinuxContainerSecurityContext { seccomp: profile(kind, ""), ..Default::default() };
            assert_eq!(filter(&context, false).is_ok(), expected, "{kind:?}");
        }
        assert_eq!(filter(&Default::default(), false), Ok(Filter::None));
    }

    fn armoured(
        new: Option<cri::SecurityProfile>,
        old: &str,
        loaded: Option<&[&str]>,
        expected: Result<Option<&str>, &str>,
    ) {
        let context = cri::LinuxContainerSecurityContext {
            apparmor: new.clone(),
            apparmor_profile: old.to_owned(),
            ..Default::default()
        };
        let loaded: Option<Vec<String>> = loaded.map(|names| names.iter().map(|n| (*n).to_owned()).collect());
        let got = apparmor(&context, loaded.as_deref()).map_err(|refusal| refusal.text);
        let expected = expected.map(|name| name.map(str::to_owned)).map_err(str::to_owned);
        assert_eq!(got, expected, "{new:?} {old}");
    }

    #[test]
    fn apparmor_profiles_have_to_be_loaded() {
        use ProfileType::{Localhost, RuntimeDefault, Unconfined};
        let some: Option<&[&str]> = Some(&["a", "cri-containerd.apparmor.d"]);
        armoured(None, "", None, Ok(None));
        armoured(None, "unconfined", None, Ok(None));
        armoured(None, "runtime/default", None, Err("apparmor is not supported"));
        armoured(profile(Localhost, "a"), "", None, Err("apparmor is not supported"));
        armoured(None, "", Some(&[]), Ok(None));
        armoured(None, "", some, Ok(Some("cri-containerd.apparmor.d")));
        armoured(None, "", Some(&["cri-containerd.apparmor.d", "berth-default"]), Ok(Some("berth-default")));
        armoured(profile(RuntimeDefault, ""), "localhost/a", some, Ok(Some("cri-containerd.apparmor.d")));
        armoured(profile(Unconfined, ""), "localhost/a", some, Ok(None));
        armoured(profile(Localhost, "localhost/a"), "", some, Ok(Some("a")));
        armoured(None, "localhost/x", some, Err("apparmor profile not found x"));
        assert_eq!(apparmor_profiles("a (enforce)\n/usr/bin/x y (z) (complain)\nodd\n"), ["a", "/usr/bin/x y (z)"]);
    }

    #[test]
    fn levels_of_labels_have_a_form() {
        for (level, expected) in [
            ("s0", true),
            ("s0-s1", true),
            ("s0:c1", true),
            ("s0-s0:c0.c1023", true),
            ("s0:c12,c3.c4,c5", true),
            ("s10", false),
            ("s0:", false),
            ("s0:c12345", false),
            ("s0:c1,", false),
            ("c1", false),
            ("s0-", false),
        ] {
            assert_eq!(is_level(level), expected, "{level}");
        }
    }

    #[test]
    fn scores_are_not_lowered_below_what_we_can() {
        let resources = cri::LinuxContainerResources { oom_score_adj: -997, ..Default::default() };
        assert_eq!(oom_score_adj(None, None), None);
        assert_eq!(oom_score_adj(Some(&resources), None), Some(-997));
        // AC-09a-X16
        assert_eq!(oom_score_adj(Some(&resources), Some(0)), Some(0));
    }
}
