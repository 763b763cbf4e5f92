//! Image credential verification: whether a pod may use an image that is present on the node.
//!
//! Pure. Implements spec 03b §3.2.

use super::record_documents::{Grants, Proof, PulledRecord, SECRETS_LIMIT, SecretRecord};

/// `imagePullCredentialsVerificationPolicy`.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub enum VerificationPolicy {
    /// `NeverVerify`
    Never,
    /// `NeverVerifyPreloadedImages`
    #[default]
    PulledImages,
    /// `NeverVerifyAllowlistedImages`, with the list: exact names, or prefixes that end in `/*`.
    Allowlist(Vec<String>),
    /// `AlwaysVerify`
    Always,
}

impl VerificationPolicy {
    /// Whether images of that repository must be verified; `ours`: this agent pulled the image.
    pub fn wants(&self, repository: &str, ours: bool) -> bool {
        match self {
            Self::Never => false,
            Self::PulledImages => ours,
            Self::Allowlist(entries) => !entries.iter().any(|entry| match entry.strip_suffix("/*") {
                Some(prefix) => repository.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('/')),
                None => entry == repository,
            }),
            Self::Always => true,
        }
    }
}

/// The `result` label of `kubelet_imagemanager_image_mustpull_checks_total`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CheckResult {
    /// The policy requires no verification.
    PolicyAllowed,
    /// A recorded credential matches, or the image needs none.
    RecordFound,
    /// The pod must authenticate to the registry.
    MustAuthenticate,
    /// Verification failed with an error.
    Error,
}

impl CheckResult {
    /// The label's value.
    pub fn label(self) -> &'static str {
        match self {
            Self::PolicyAllowed => "credentialPolicyAllowed",
            Self::RecordFound => "credentialRecordFound",
            Self::MustAuthenticate => "mustAuthenticate",
            Self::Error => "error",
        }
    }
}

/// Decision before the pod's credentials are known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum InitialDecision {
    /// The decision is final.
    Done {
        /// Whether the image must be pulled.
        pull: bool,
        /// Metric label; `None` if the check is not counted.
        result: Option<CheckResult>,
    },
    /// The decision depends on comparing the pod's credentials with these grants.
    Compare(Grants),
}

impl InitialDecision {
    fn done(pull: bool, result: CheckResult) -> Self {
        Self::Done { pull, result: Some(result) }
    }
}

/// Data about an image that is present.
#[derive(Clone, Copy, Debug)]
pub struct PresentImage<'a> {
    /// The runtime's image reference.
    pub image_ref: &'a str,
    /// The record; `Err` if it could not be read.
    pub record: Result<Option<&'a PulledRecord>, ()>,
    /// Whether a pull of it was started but not recorded.
    pub intent: bool,
    /// Image name without tag and digest; `None` if it does not parse.
    pub repository: Option<&'a str>,
}

/// Decides by rows 1 to 7 of the table.
pub fn begin(policy: &VerificationPolicy, known: PresentImage<'_>) -> InitialDecision {
    use CheckResult::{Error, MustAuthenticate, PolicyAllowed, RecordFound};
    if known.image_ref.is_empty() {
        return InitialDecision::Done { pull: true, result: None };
    }
    let Ok(record) = known.record else { return InitialDecision::done(true, Error) };
    if !policy.wants(known.repository.unwrap_or_default(), record.is_some() || known.intent) {
        return InitialDecision::done(false, PolicyAllowed);
    }
    let Some(record) = record else { return InitialDecision::done(true, MustAuthenticate) };
    let Some(repository) = known.repository else { return InitialDecision::done(true, Error) };
    match record.grants.get(repository) {
        None => InitialDecision::done(true, MustAuthenticate),
        Some(grants) if grants.node => InitialDecision::done(false, RecordFound),
        Some(grants) if grants.secrets.is_empty() && grants.accounts.is_empty() => {
            InitialDecision::done(true, MustAuthenticate)
        }
        Some(grants) => InitialDecision::Compare(grants.clone()),
    }
}

/// Decision once the pod's credentials are known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CredentialDecision {
    /// Whether the image must be pulled.
    pub pull: bool,
    /// Credential to add to the record.
    pub remember: Option<Proof>,
}

/// Decides by rows 9 to 12 of the table, for the pod's credentials.
pub fn compare(grants: &Grants, proofs: &[Proof]) -> CredentialDecision {
    let room = grants.secrets.len() < SECRETS_LIMIT;
    let secrets = || proofs.iter().filter_map(|p| if let Proof::Secret(s) = p { Some(s) } else { None });
    let learn = |secret: &SecretRecord| Some(Proof::Secret(secret.clone())).filter(|_| room);
    let allowed = |remember| CredentialDecision { pull: false, remember };
    let same_hash = |s: &&SecretRecord| !s.hash.is_empty() && grants.secrets.iter().any(|g| g.hash == s.hash);
    if let Some(secret) = secrets().find(same_hash) {
        let known = grants.secrets.iter().any(|g| g == secret);
        return allowed(if known { None } else { learn(secret) });
    }
    let same_place = |s: &&SecretRecord| grants.secrets.iter().any(|g| g.coordinates() == s.coordinates());
    if let Some(secret) = secrets().find(same_place).filter(|_| room) {
        return allowed(learn(secret));
    }
    let account = proofs.iter().any(|p| matches!(p, Proof::Account(a) if grants.accounts.contains(a)));
    CredentialDecision { pull: !account, remember: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::record_documents::AccountRecord;

    const REPO: &str = "docker.io/library/busybox";

    fn secret(name: &str, hash: &str) -> SecretRecord {
        SecretRecord { uid: "u".into(), namespace: "ns".into(), name: name.into(), hash: hash.into() }
    }

    fn account(name: &str) -> AccountRecord {
        AccountRecord { uid: "u".into(), namespace: "ns".into(), name: name.into() }
    }

    fn record(grants: &[Proof]) -> PulledRecord {
        let mut record = PulledRecord::new("sha256:1", jiff::Timestamp::UNIX_EPOCH);
        let entry = record.grants.entry(REPO.into()).or_default();
        grants.iter().for_each(|g| entry.add(g));
        record
    }

    #[test]
    fn policies_want_different_things() {
        let list = VerificationPolicy::Allowlist(vec!["r.io/team/*".into(), "r.io/app".into()]);
        let rows = [
            (&VerificationPolicy::Never, "x", true, false),
            (&VerificationPolicy::PulledImages, "x", true, true),
            (&VerificationPolicy::PulledImages, "x", false, false),
            (&VerificationPolicy::Always, "x", false, true),
            (&list, "r.io/team/app", true, false),
            (&list, "r.io/teams/app", true, true),
            (&list, "r.io/team", true, true),
            (&list, "r.io/app", true, false),
            (&list, "r.io/app2", false, true),
        ];
        for (policy, repository, ours, expected) in rows {
            assert_eq!(policy.wants(repository, ours), expected, "{policy:?} {repository}");
        }
    }

    #[test]
    fn rows_one_to_seven() {
        use CheckResult::{Error, MustAuthenticate, PolicyAllowed, RecordFound};
        let (node, empty) = (record(&[Proof::Node]), record(&[]));
        let full = record(&[Proof::Secret(secret("a", "h"))]);
        let policy = VerificationPolicy::PulledImages;
        let known = |record| PresentImage { image_ref: "sha256:1", record, intent: false, repository: Some(REPO) };
        let check = |row: &str,
                     policy: &VerificationPolicy,
                     known: PresentImage<'_>,
                     pull: bool,
                     result: Option<CheckResult>| {
            assert_eq!(begin(policy, known), InitialDecision::Done { pull, result }, "{row}");
        };
        check("1", &policy, PresentImage { image_ref: "", ..known(Ok(None)) }, true, None);
        check("2", &policy, known(Err(())), true, Some(Error));
        check("3, AC-03b-18", &policy, known(Ok(None)), false, Some(PolicyAllowed));
        check("3", &VerificationPolicy::Never, known(Ok(Some(&full))), false, Some(PolicyAllowed));
        check("4", &VerificationPolicy::Always, known(Ok(None)), true, Some(MustAuthenticate));
        let crashed = PresentImage { intent: true, ..known(Ok(None)) };
        check("4, begun and never recorded", &policy, crashed, true, Some(MustAuthenticate));
        let nameless = PresentImage { repository: None, ..known(Ok(Some(&full))) };
        check("5", &policy, nameless, true, Some(Error));
        let other = PresentImage { repository: Some("r.io/x"), ..known(Ok(Some(&full))) };
        check("5", &policy, other, true, Some(MustAuthenticate));
        check("6", &policy, known(Ok(Some(&node))), false, Some(RecordFound));
        check("7, AC-03b-19", &policy, known(Ok(Some(&empty))), true, Some(MustAuthenticate));
        assert!(matches!(begin(&policy, known(Ok(Some(&full)))), InitialDecision::Compare(_)));
    }

    #[test]
    fn rows_nine_to_twelve() {
        let grants = |proofs: &[Proof]| record(proofs).grants.remove(REPO).unwrap_or_default();
        let one = grants(&[Proof::Secret(secret("a", "h"))]);
        let check = |row: &str, grants: &Grants, proofs: &[Proof], pull: bool, remember: Option<Proof>| {
            assert_eq!(compare(grants, proofs), CredentialDecision { pull, remember }, "{row}");
        };
        check("9", &one, &[Proof::Secret(secret("a", "h"))], false, None);
        let other = Proof::Secret(secret("b", "h"));
        check("9, AC-03b-17", &one, std::slice::from_ref(&other), false, Some(other.clone()));
        let rotated = Proof::Secret(secret("a", "h2"));
        check("10", &one, std::slice::from_ref(&rotated), false, Some(rotated.clone()));
        check("12, AC-03b-15", &one, &[], true, None);
        check("12", &one, &[Proof::Secret(secret("b", "h2"))], true, None);
        check("12", &one, &[Proof::Node], true, None);
        let accounts = grants(&[Proof::Account(account("sa"))]);
        check("11", &accounts, &[Proof::Account(account("sa"))], false, None);
        check("12", &accounts, &[Proof::Account(account("sb"))], true, None);
        let many: Vec<Proof> = (0..100).map(|i| Proof::Secret(secret(&format!("s{i}"), &format!("h{i}")))).collect();
        let full = grants(&many);
        check("9, full", &full, &[Proof::Secret(secret("b", "h7"))], false, None);
        check("10, full", &full, &[Proof::Secret(secret("s7", "new"))], true, None);
    }
}
