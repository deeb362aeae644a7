// Calls a Tandem cluster from Go: ./generate.sh && go mod tidy && go run . [HOST:PORT]
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	pb "tandem-go-example/tandemv1"
)

// gRPC's own retries, for a gateway that starts, drains or has lost its scheduler. A stream is retried until its first
// message.
const retries = `{
  "methodConfig": [{
    "name": [{"service": "tandem.v1.GenerationService"}],
    "retryPolicy": {
      "maxAttempts": 5, "initialBackoff": "0.2s", "maxBackoff": "5s", "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
}`

func connect(target string) (*grpc.ClientConn, error) {
	return grpc.NewClient(target,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(retries),
		// Log-probabilities of a long prompt are more than the default of 4 MiB.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)),
		// Notices a gateway that was cut off in the middle of a stream.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
	)
}

// Unset differs from 0 in a request, so optional fields are pointers.
func float(value float32) *float32 { return &value }
func count(value uint32) *uint32   { return &value }
func seed(value uint64) *uint64    { return &value }
func yes() *bool                   { value := true; return &value }

// The whole answer at once. The same seed always gives the same answer.
func unary(client pb.GenerationServiceClient) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	response, err := client.Generate(ctx, &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: "Once upon a time"},
		Sampling: &pb.SamplingParams{Temperature: float(0.7), Seed: seed(1)},
		Stop:     &pb.StopCriteria{MaxTokens: count(32), IgnoreEos: yes()},
	})
	if err != nil {
		return err
	}
	fmt.Printf("unary: %q\n", response.Choices[0].Text)
	return nil
}

// A conversation, rendered with the model's own template; text as it comes.
func chat(client pb.GenerationServiceClient) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	messages := []*pb.ChatMessage{{Role: "user", Content: "Why is the sky blue?"}}
	stream, err := client.GenerateStream(ctx, &pb.GenerateStreamRequest{
		Prompt:   &pb.GenerateStreamRequest_Chat{Chat: &pb.ChatPrompt{Messages: messages}},
		Sampling: &pb.SamplingParams{Temperature: float(0)},
		Stop:     &pb.StopCriteria{MaxTokens: count(32)},
	})
	if err != nil {
		return err
	}
	fmt.Print("chat: ")
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		for _, delta := range response.Deltas {
			fmt.Print(delta.Text)
		}
		if usage := response.Usage; usage != nil { // on the last message only
			fmt.Printf("\nusage: %d prompt tokens, %d completion tokens\n", usage.PromptTokens, usage.CompletionTokens)
		}
	}
}

// As many tokens as the context holds, until ctx ends; after each message `received` is told how many came so far.
func longStory(ctx context.Context, client pb.GenerationServiceClient, received func(numTokens int)) error {
	stream, err := client.GenerateStream(ctx, &pb.GenerateStreamRequest{
		Prompt: &pb.GenerateStreamRequest_Text{Text: "A very long story:"},
		Stop:   &pb.StopCriteria{IgnoreEos: yes()},
	})
	for numTokens := 0; err == nil; {
		var response *pb.GenerateStreamResponse
		if response, err = stream.Recv(); err == nil {
			for _, delta := range response.Deltas {
				numTokens += len(delta.TokenIds)
			}
			received(numTokens)
		}
	}
	return err
}

// No more than so much time, the waiting included. What came until then is yours.
func deadline(client pb.GenerationServiceClient) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	amount := "no"
	err := longStory(ctx, client, func(int) { amount = "some" })
	fmt.Printf("deadline: %s after %s tokens\n", status.Code(err), amount)
}

// The cluster stops at the next step and has its memory back.
func cancelled(client pb.GenerationServiceClient) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	err := longStory(ctx, client, func(numTokens int) {
		if numTokens >= 5 {
			cancel()
		}
	})
	if status.Code(err) == codes.Canceled {
		fmt.Println("cancelled after 5 tokens or a few more")
	}
}

// Every error of the cluster carries an ErrorInfo, and most one detail more.
func wrongField(client pb.GenerationServiceClient) {
	_, err := client.Generate(context.Background(), &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: "Once upon a time"},
		Sampling: &pb.SamplingParams{Temperature: float(-1)},
	})
	reason := ""
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = detail.Reason
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fmt.Printf("error: %s %s %s: %s\n", status.Code(err), reason, violation.Field, violation.Description)
			}
		}
	}
}

func main() {
	target := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	connection, err := connect(target)
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := pb.NewGenerationServiceClient(connection)
	if err := unary(client); err != nil {
		log.Fatal(err)
	}
	if err := chat(client); err != nil {
		log.Fatal(err)
	}
	deadline(client)
	cancelled(client)
	wrongField(client)
}
