//! TokenReview and SubjectAccessReview with verdicts that were told before; they go before the rules.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use super::{ApiServer, view::Request};

/// Path of TokenReview.
pub const TOKENS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
/// Path of SubjectAccessReview.
pub const ACCESSES: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";

/// What it says to reviews.
#[derive(Default)]
pub struct Verdicts {
    /// Token to the status of its review.
    tokens: HashMap<String, Value>,
    /// User, verb and subresource.
    allowed: HashSet<(String, String, String)>,
}

impl Verdicts {
    /// The answer to a review whose verdict was told.
    pub(super) fn told(&self, request: &Request) -> Option<Value> {
        let review = request.body.as_ref().filter(|_| request.verb == "create")?;
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match request.plural() {
            "tokenreviews" => {
                let status = self.tokens.get(review["spec"]["token"].as_str()?)?;
                Some(answered(review, status.clone()))
            }
            "subjectaccessreviews" => {
                let (spec, what) = (&review["spec"], &review["spec"]["resourceAttributes"]);
                let access = (word(&spec["user"]), word(&what["verb"]), word(&what["subresource"]));
                let is_told = what["resource"] == "nodes" && self.allowed.contains(&access);
                is_told.then(|| answered(review, json!({"allowed": true})))
            }
            _ => None,
        }
    }

    /// The answer to a review that nobody has one for.
    pub(super) fn refused(request: &Request) -> Value {
        let status = match request.plural() {
            "tokenreviews" => json!({"authenticated": false, "user": {}}),
            _ => json!({"allowed": false}),
        };
        answered(request.body.as_ref().unwrap_or(&Value::Null), status)
    }
}

fn answered(review: &Value, status: Value) -> Value {
    let mut answer = review.clone();
    answer["status"] = status;
    answer
}

impl ApiServer {
    /// That token is that user's.
    pub fn accept_token(&self, token: &str, user: &str, groups: &[&str]) {
        let status = json!({"authenticated": true, "user": {"username": user, "uid": format!("uid-{user}"),
                            "groups": groups, "extra": {"seen": ["yes"]}}});
        self.shared.core().reviews.tokens.insert(token.to_owned(), status);
    }

    /// That token is nobody's, and this is why.
    pub fn refuse_token(&self, token: &str, why: &str) {
        let status = json!({"authenticated": false, "user": {}, "error": why});
        self.shared.core().reviews.tokens.insert(token.to_owned(), status);
    }

    /// That user may do that with that subresource of nodes.
    pub fn allow(&self, user: &str, verb: &str, subresource: &str) {
        let access = (user.to_owned(), verb.to_owned(), subresource.to_owned());
        self.shared.core().reviews.allowed.insert(access);
    }

    /// He may not any more.
    pub fn forbid(&self, user: &str, verb: &str, subresource: &str) {
        let access = (user.to_owned(), verb.to_owned(), subresource.to_owned());
        self.shared.core().reviews.allowed.remove(&access);
    }
}
