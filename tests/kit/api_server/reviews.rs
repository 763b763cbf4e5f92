//! TokenReview and SubjectAccessReview with verdicts that were told before.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use super::ApiServer;

pub const TOKENS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
pub const ACCESSES: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";

/// What it says to reviews; who and what it does not know it refuses without a reason.
#[derive(Default)]
pub struct Verdicts {
    /// Token to the status of its review.
    tokens: HashMap<String, Value>,
    /// User, verb and subresource.
    allowed: HashSet<(String, String, String)>,
}

impl Verdicts {
    pub(super) fn token(&self, review: &Value) -> Value {
        let token = review["spec"]["token"].as_str().unwrap_or_default();
        let refused = json!({"authenticated": false, "user": {}});
        answered(review, self.tokens.get(token).cloned().unwrap_or(refused))
    }

    pub(super) fn access(&self, review: &Value) -> Value {
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (spec, what) = (&review["spec"], &review["spec"]["resourceAttributes"]);
        let allowed = self.allowed.contains(&(word(&spec["user"]), word(&what["verb"]), word(&what["subresource"])));
        answered(review, json!({"allowed": allowed && what["resource"] == "nodes"}))
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
        self.state().reviews.tokens.insert(token.to_owned(), status);
    }

    /// That token is nobody's, and this is why.
    pub fn refuse_token(&self, token: &str, why: &str) {
        let status = json!({"authenticated": false, "user": {}, "error": why});
        self.state().reviews.tokens.insert(token.to_owned(), status);
    }

    /// That user may do that with that subresource of nodes.
    pub fn allow(&self, user: &str, verb: &str, subresource: &str) {
        let access = (user.to_owned(), verb.to_owned(), subresource.to_owned());
        self.state().reviews.allowed.insert(access);
    }

    /// He may not any more.
    pub fn forbid(&self, user: &str, verb: &str, subresource: &str) {
        let access = (user.to_owned(), verb.to_owned(), subresource.to_owned());
        self.state().reviews.allowed.remove(&access);
    }
}
